# SPDX-License-Identifier: Apache-2.0
"""Methods that a test registers for itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvfold.methods import registry


@contextmanager
def registry_restored(*modules: str) -> Iterator[None]:
    """What the block registers is gone after it, and so are `modules` that it imports."""
    registry.list_methods()
    known, loaded, path = dict(registry._REGISTRY), set(sys.modules), list(sys.path)
    try:
        yield
    finally:
        registry._REGISTRY.clear()
        registry._REGISTRY.update(known)
        registry._IMPORTED.clear()
        sys.path[:] = path
        for name in set(modules) & (set(sys.modules) - loaded):
            del sys.modules[name]
