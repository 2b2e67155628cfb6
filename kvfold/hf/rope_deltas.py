# SPDX-License-Identifier: Apache-2.0
"""M-RoPE's `rope_deltas`: positions less columns, as an image takes fewer positions than columns.

Models that count so (Qwen2-VL and its like) keep them for the text that they read last, whichever
cache it went to. Here each cache keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

NAME = "rope_deltas"
# Of each module that keeps them, `[B, 1]`; None before its first text
Deltas = tuple[Tensor | None, ...]


def holders(model: nn.Module) -> tuple[nn.Module, ...]:
    """Modules that keep `rope_deltas`; none in most models."""
    return tuple(module for module in model.modules() if hasattr(module, NAME))


def taken(modules: tuple[nn.Module, ...]) -> Deltas:
    """Offsets that the modules keep now."""
    return tuple(getattr(module, NAME) for module in modules)


def put(modules: tuple[nn.Module, ...], deltas: Deltas | None) -> None:
    """Gives the modules the `deltas` of a cache's text; None: those of a new text."""
    for module, own in zip(modules, deltas or (None,) * len(modules), strict=True):
        setattr(module, NAME, own)


def offset(cache: object) -> Tensor | int:
    """Distance of new tokens' positions from those without images, `[B, 1]`; 0 in most models."""
    own: Deltas = getattr(cache, NAME, None) or ()
    return next((deltas for deltas in own if deltas is not None), 0)


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """A block in which the model has no `rope_deltas`; those before it are put back at its end."""
    modules = holders(model)
    before = taken(modules)
    put(modules, None)
    try:
        yield
    finally:
        put(modules, before)
