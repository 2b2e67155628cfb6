# SPDX-License-Identifier: Apache-2.0
"""Attention that each entry received, and its square, summed over all queries that were read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.kernels.gather import joined, parted
from kvfold.observers.base import Layer, Need, Observer, per_stored_head
from kvfold.observers.call import AttentionCall


class RunningSums(Observer[Tensor]):
    """Sums `[B, H, T]`, float32, over queries: of the mean over the group, or of its square."""

    empties: ClassVar[dict[str, float]] = {"sums": 0}

    def read(self, layer: Layer, call: AttentionCall) -> None:
        if call.sums is not None:
            self.add(layer, call.sums)

    def add(self, layer: Layer, sums: Tensor) -> None:
        """Adds the sums `[B, H, T]` of one call, which are overwritten."""
        layer.stay()
        add_together([self], per_stored_head(layer, sums))

    def of(self, layer: Layer, call: AttentionCall | None) -> Tensor | None:
        (name,) = self.empties
        return self.numbers.get(name)


def add_together(running: Sequence[Observer[Tensor]], new: Tensor) -> None:
    """Adds `new [L·B, H, T]`, sums of the stored heads of L layers of one shape; overwritten."""
    (name,) = running[0].empties
    if name in running[0].numbers:
        old = joined([of_layer.numbers[name] for of_layer in running])
        new[..., : old.shape[-1]].add_(old)
    for of_layer, sums in zip(running, parted(new, len(running)), strict=True):
        of_layer.numbers[name] = sums


class RunningSquares(RunningSums):
    """Sums of squares."""

    empties: ClassVar[dict[str, float]] = {"squares": 0}

    def read(self, layer: Layer, call: AttentionCall) -> None:
        if call.squares is not None:
            self.add(layer, call.squares)


@dataclass(frozen=True)
class ColumnSums(Need[Tensor]):
    """`[B, H, T]`: attention received, of the mean over the group, summed over queries."""

    empty: ClassVar[float | None] = 0
    while_reading: ClassVar[bool] = True
    beyond_attention: ClassVar[bool] = False
    words: ClassVar[str] = "attention sums"
    keyword: ClassVar[str] = "column_sums"
    field: ClassVar[str] = "column_sums"

    def observer(self, fitted: object = None) -> RunningSums:
        return RunningSums()


@dataclass(frozen=True)
class ColumnSquares(Need[Tensor]):
    """`[B, H, T]`: as `ColumnSums`, which it needs beside it, of the mean's square."""

    empty: ClassVar[float | None] = 0
    while_reading: ClassVar[bool] = True
    beyond_attention: ClassVar[bool] = False
    words: ClassVar[str] = "their squares"
    keyword: ClassVar[str] = "column_squares"
    field: ClassVar[str] = "column_squares"

    def observer(self, fitted: object = None) -> RunningSquares:
        return RunningSquares()
