# SPDX-License-Identifier: Apache-2.0
"""What a command says about the file of records it goes on with."""

from __future__ import annotations

from rich.console import Console

from kvfold.errors import KvfoldError
from kvfold.jsonl import M, Store


def loaded(screen: Console, store: Store[M]) -> list[M]:
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
