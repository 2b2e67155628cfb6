# SPDX-License-Identifier: Apache-2.0
"""Methods, one file each; `base.py` defines a method, `stages/` holds the stages they share."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """The package as a module that can be called, as `kvfold.methods()` was once a function."""

    def __call__(self) -> dict[str, Any]:
        """`kvfold.list_methods()`, with a DeprecationWarning."""
        from kvfold.methods.registry import list_methods

        warnings.warn(
            "kvfold.methods is a package: call kvfold.list_methods()",
            DeprecationWarning,
            stacklevel=2,
        )
        return list_methods()


sys.modules[__name__].__class__ = _Package
