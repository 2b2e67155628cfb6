# SPDX-License-Identifier: Apache-2.0
"""One file per method; `base.py` says what a method is, `stages/` holds what they share."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """The package, which may still be called as the function it once was."""

    def __call__(self) -> dict[str, Any]:
        """The same as `kvfold.list_methods()`; warns."""
        from kvfold.methods.registry import list_methods

        warnings.warn(
            "kvfold.methods is a package: call kvfold.list_methods()",
            DeprecationWarning,
            stacklevel=2,
        )
        return list_methods()


sys.modules[__name__].__class__ = _Package
