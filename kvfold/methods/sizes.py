# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvfold.methods.base import Across, Method, Stages, register
from kvfold.methods.fitted import NO_FILE, FileName
from kvfold.methods.observation import Needs
from kvfold.methods.stages.allocate.parts import PartsFile, bounds, by_parts
from kvfold.methods.stages.score.observation_window import check_window, window_votes
from kvfold.methods.stages.select.forced import Forced


@register(
    "sizes",
    formula="size[l, h] = λ·part[l, h], from the forced entries to n,  with Σ size = L·H·mean size",
)
@dataclass(frozen=True)
class Sizes(Method):
    """Sizes of layers, or of KV heads, that you write into a file: "snapkv + sizes:file=FILE".

    The file holds the part of its entries that each layer keeps, or each KV head: a JSON list of L
    numbers, or of L lists of H numbers, or a safetensors file whose tensor `parts` has that shape.
    `{"budgets": …, "parts": …}` gives such lists for several budgets, between which parts are
    interpolated; a curve published for LU-KV holds the parts removed, so write one minus them.

    The budget is met exactly: parts are scaled so that their mean is the budget, within what a head
    must and can keep, and rounded together by one largest remainder. With their own mean as budget
    they are kept as written. Another method scores; alone, the last `window` queries vote, as in
    SnapKV. Parts of layers go with `adakv`, parts of heads do not. Raises KvfoldError
    for a window below 1 and, when a cache is made, for parts that do not fit the model.
    Source: NVIDIA/kvpress `per_layer_compression_press.py`.
    """

    by_head: ClassVar[bool] = True
    file: FileName = NO_FILE  # parts kept of layers or KV heads
    window: int = 32  # last queries that vote; their entries always stay

    def __post_init__(self) -> None:
        check_window(self.window, 1)

    def stages(self) -> Stages:
        votes = partial(window_votes, window=self.window, kernel=7, pooling="max")
        return Stages(
            needs=Needs(window=self.window),
            score=votes,
            allocate=self._sizes(),
            forced=Forced(recent=self.window),
        )

    def brings(self) -> Stages:
        return Stages(allocate=self._sizes())

    def _sizes(self) -> Across:
        parts = PartsFile(str(self.file))
        return Across(bounds, by_parts, unrounded=True, in_rounds=True, parts=parts)
