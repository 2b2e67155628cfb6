# SPDX-License-Identifier: Apache-2.0
"""kvfold: a KV cache that stays small. `__init__.pyi` lists the public names.

Each is imported when it is first asked for, so that `import kvfold` needs no torch.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    alias.name: str(node.module)
    for node in _STUB.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

__all__ = sorted(_MODULES)


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})


def __getattr__(name: str) -> Any:
    """A public name, imported now and bound here."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
