# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvfold.errors import KvfoldError
from kvfold.fitted.numbers import NO_FILE, FileName
from kvfold.methods.base import Across, Forced, LastQueries, Method, Needs, Stages, register
from kvfold.methods.stages.allocate.parts import (
    LayerParts,
    PartsFile,
    bounds,
    by_own_budgets,
    by_parts,
)
from kvfold.methods.stages.score.observation_window import check_window, window_votes


@register(
    "sizes",
    formula="size[l, h] = λ·part[l, h], from the forced entries to n,  with Σ size = L·H·mean size",
)
@dataclass(frozen=True)
class Sizes(Method):
    """Sizes of layers, or of KV heads, that you write into a file: "snapkv + sizes:file=FILE".

    The file holds the part of its entries that each layer keeps, or each KV head: a JSON list of L
    numbers, or of L lists of H numbers, or a safetensors file whose tensor `parts` has that shape.
    `budget=[0.2, 0.5, …]` of a cache needs none: they are `parts`, each layer's own budget.
    `{"budgets": …, "parts": …}` gives such lists for several budgets, between which parts are
    interpolated; a curve published for LU-KV holds the parts removed, so write one minus them.

    The budget is met exactly: parts are scaled so that their mean is the budget, within what a head
    must and can keep, and rounded together by one largest remainder. With their own mean as budget
    they are kept as written. Another method scores; alone, the last `window` queries vote, as in
    SnapKV. Parts of layers go with `adakv`, parts of heads do not. Raises KvfoldError
    for a window below 1, for a file and parts at once and, when a cache is made, for parts that do
    not fit the model.
    Source: NVIDIA/kvpress `per_layer_compression_press.py`.
    """

    by_head: ClassVar[bool] = True
    file: FileName = NO_FILE  # parts kept of layers or KV heads
    parts: tuple[float, ...] = ()  # instead of a file: the budget of each layer, ratios or tokens
    window: int = 32  # last queries that vote; their entries always stay

    def __post_init__(self) -> None:
        check_window(self.window, 1)
        if self.parts and self.file != NO_FILE:
            raise KvfoldError(f"sizes takes a file or parts, not both: {self.file}, {self.parts}")

    def stages(self) -> Stages:
        votes = partial(window_votes, window=self.window, kernel=7, pooling="max")
        return Stages(
            needs=Needs(LastQueries(self.window)),
            score=votes,
            allocate=self._sizes(),
            forced=Forced(recent=self.window),
        )

    def brings(self) -> Stages:
        return Stages(allocate=self._sizes())

    def _sizes(self) -> Across:
        if self.parts:
            own = LayerParts(self.parts)
            share = partial(by_own_budgets, own=own)
            return Across(bounds, share, unrounded=True, in_rounds=True, parts=own)
        parts = PartsFile(str(self.file))
        return Across(bounds, by_parts, unrounded=True, in_rounds=True, parts=parts)
