# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from kvfold.errors import KvfoldError
from kvfold.fitted.numbers import NO_FILE, FileName, FittedFile
from kvfold.methods.base import Across, Forced, Method, Needs, Stages, register
from kvfold.methods.stages.allocate import retrieval
from kvfold.methods.stages.score.position import recency
from kvfold.observers.fitted import HeadNumbers

WHOLE = "heads keep everything, or their first and last tokens"


@register(
    "duo",
    paper="arXiv 2410.10819",
    formula="""
        size[l, h] = n if α[l, h] is among the best that fit the budget, else sinks + recent
    """,
    presets={"paper": {"threshold": 0.5}, "official": {"sparsity": 0.5}},
)
@dataclass(frozen=True)
class Duo(Method):
    """Retrieval heads keep everything; streaming heads keep the first and the last tokens.

    1. A file scores each KV head by α from 0 to 1. `kvfold fit MODEL TEXTS --scorer duo` fits one
       in place of the paper's training: how far back a head's mean query looks among mean keys.
    2. As many heads of the highest α as the budget holds are retrieval heads. With `threshold`
       there is no budget, and those of at least that α are; with `sparsity`, as released, those
       from that quantile of all α on, and none at 1.

    `file` names the scores: a file of `kvfold fit`, or a text table (.tsv, .txt) of a line of
    numbers for each layer, as the authors publish them, clipped to 0 … 1; none: those of the
    bundled model. Heads are chosen when a prompt ends. While decoding, all heads add to what they
    keep; with `every`, as in "duo + every:interval=32", streaming heads are brought back to their
    size after so many tokens. The released code does so at every token. A budget below a streaming
    head's size shortens its window. Raises KvfoldError for options out of range.
    Source: Xiao et al., sections 2.2 and 2.3; mit-han-lab/duo-attention `duo_attn/utils.py`;
    NVIDIA/kvpress `duo_attention_press.py`, on-the-fly scores.
    """

    by_head: ClassVar[bool] = True
    file: FileName = NO_FILE  # scores of heads, none: the bundled model's
    threshold: float = 0.0  # α of retrieval heads, without a budget; 0: as many as fit
    sparsity: float = 0.0  # part of the heads that stream, without a budget; 0: as many as fit
    sinks: int = 128  # first tokens that a streaming head keeps
    recent: int = 256  # last tokens that it keeps

    def __post_init__(self) -> None:
        self.check_range(0, None, "sinks")
        self.check_range(1, None, "recent")
        self.check_range(0, 1, "threshold", "sparsity")
        if self.threshold and self.sparsity:
            raise KvfoldError("duo: heads are chosen by threshold or by sparsity: leave out one")

    @property
    def takes_budget(self) -> bool:  # type: ignore[override]
        """False with a threshold or a sparsity."""
        return not (self.threshold or self.sparsity)

    def stages(self) -> Stages:
        window = self.sinks + self.recent
        share = partial(retrieval.fitting, window=window)
        if self.threshold:
            share = partial(retrieval.above, window=window, threshold=self.threshold)
        if self.sparsity:
            share = partial(retrieval.above_quantile, window=window, sparsity=self.sparsity)
        return Stages(
            needs=Needs(HeadNumbers(FittedFile(retrieval.RetrievalScores, str(self.file)))),
            score=recency,
            allocate=Across(retrieval.retrieval_scores, share, per_head=True, in_rounds=True),
            forced=Forced(sinks=self.sinks),
            inexact=WHOLE if self.takes_budget else "",
        )
