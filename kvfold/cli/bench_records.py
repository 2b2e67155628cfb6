# SPDX-License-Identifier: Apache-2.0
"""What `kvfold bench` says about the file it goes on with."""

from __future__ import annotations

from typing import TypeVar

from rich.console import Console

from kvfold.bench.record import Line, Store
from kvfold.errors import KvfoldError

L = TypeVar("L", bound=Line)


def loaded(screen: Console, store: Store[L]) -> list[L]:
    """The records so far, and a word about what a killed run left behind."""
    try:
        store.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise KvfoldError(f"cannot write {store.path}: {problem}") from problem
    found = store.load()
    if found.torn:
        screen.print(f"dropped a last line of {found.torn} bytes that was only half written")
    if found.records:
        screen.print(f"{store.path} holds {len(found.records)} records already")
    return found.records
