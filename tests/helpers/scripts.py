# SPDX-License-Identifier: Apache-2.0
"""Scripts beside the package, imported as if they ran."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
GENERATE = ROOT / "docs" / "generate"


@contextmanager
def scripts_of(folder: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Imports scripts of `folder` by name, and those that they import; forgets them at the end."""
    path, known = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield import_module
    finally:
        sys.path[:] = path
        for script in folder.glob("*.py"):
            if script.stem not in known:
                sys.modules.pop(script.stem, None)


def module_of(folder: Path, name: str) -> Any:
    """A fixture of a test module: the script `name` of `folder`, forgotten after its tests."""

    @pytest.fixture(scope="module")
    def module() -> Iterator[ModuleType]:
        with scripts_of(folder) as script:
            yield script(name)

    return module
