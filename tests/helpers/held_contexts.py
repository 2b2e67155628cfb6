# SPDX-License-Identifier: Apache-2.0
"""Contexts that a pool holds in memory, and what is counted of them."""

from __future__ import annotations

from kvfold.serve.context_pool import ContextPool
from kvfold.serve.stored import size_of


def in_memory(contexts: ContextPool) -> list[str]:
    return [held.id for held in contexts.all() if held.value is not None]


def counted(contexts: ContextPool) -> int:
    """Bytes of what is in memory, by its own tensors."""
    with contexts._changed:  # what is there at one moment, while other threads read and move
        there = [held.value for held in contexts._held.values() if held.value is not None]
    return sum(map(size_of, there))
