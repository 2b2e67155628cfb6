# SPDX-License-Identifier: Apache-2.0
"""Packages that take seconds to import: imported by the first test that uses them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest


class Package:
    """A package by its name; `optional`: a test that uses it is skipped without it."""

    def __init__(self, name: str, *, optional: bool = False) -> None:
        self._import = pytest.importorskip if optional else import_module
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._import(self._name), attribute)
