# SPDX-License-Identifier: Apache-2.0
"""KVzip's observation: the most attention that entries receive while the text is repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.observers.base import Layer, Need, Observer, per_stored_head
from kvfold.observers.call import AttentionCall

NAME = "reconstruction_scores"


class ReconstructionScores(Observer[Tensor]):
    """Maxima `[B, H, T]` over the group and all queries, or roots of mean squares."""

    empties: ClassVar[dict[str, float]] = {NAME: 0}

    @property
    def scores(self) -> Tensor | None:
        """The maxima so far; None before the text was repeated, and when entries have left."""
        return self.numbers.get(NAME)

    def add(self, layer: Layer, maxima: Tensor, text: int) -> None:
        """Adds those of one call; entries behind the `text`, which are cropped later, are not."""
        maxima = per_stored_head(layer, maxima)[..., :text]
        old = self.scores
        self.set(maxima.clone() if old is None else torch.maximum(old, maxima))

    def set(self, scores: Tensor) -> None:
        """Takes `scores [B, H, T]` for the maxima."""
        self.numbers = {NAME: scores}

    def forget(self) -> None:
        """Drops the maxima, by which the layer has been evicted."""
        self.numbers = {}

    def of(self, layer: Layer, call: AttentionCall | None) -> Tensor | None:
        return self.scores


@dataclass(frozen=True)
class ContextReconstruction(Need[Tensor]):
    """`[B, H, T]`: maximum over the group and all queries of KVzip's reconstruction.

    These are forwards that let the model repeat the text in parts. With a file of `questions`, a
    line each, these are read after the text, and nothing is repeated.
    """

    empty: ClassVar[float | None] = 0
    while_reading: ClassVar[bool] = True
    beyond_attention: ClassVar[bool] = False
    words: ClassVar[str] = "the text being repeated"
    keyword: ClassVar[str] = "reconstruction"
    field: ClassVar[str] = "reconstruction_scores"

    chunk: int  # tokens of a part
    first: str  # prompt that asks for the first part
    later: str  # prompt that asks for a later part, before the `previous` tokens
    previous: int  # last tokens of the preceding part that a later prompt quotes
    instruction: str = ""  # text before the context; it does not count in the budget
    head_scores: str | None = None  # file of head scores; nothing is repeated then
    normalize: bool = False  # attention times ‖W_o v‖ of the entry over ‖h‖ of the query (KVzip+)
    demote: float = 0.0  # factor of the scores of structural tokens, 0: none
    demote_repeats: int = 4  # occurrences in the text from which a token may be structural
    rms: bool = False  # root of the mean square of attention, instead of its maximum
    questions: str | None = None  # file of them

    def observer(self, fitted: object = None) -> ReconstructionScores:
        return ReconstructionScores()

    def joined(self, other: ContextReconstruction) -> ContextReconstruction:
        return self

    def describe(self) -> str:
        return "questions about the text" if self.questions else self.words
