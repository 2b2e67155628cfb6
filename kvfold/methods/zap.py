# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from kvfold.errors import KvfoldError
from kvfold.fitted.numbers import NO_FILE, FileName, FittedFile
from kvfold.methods.base import Across, Forced, Method, Needs, Stages, register, uniform
from kvfold.methods.stages.allocate.pool import candidates_of, pooled
from kvfold.methods.stages.score.learned import Scorer, learned
from kvfold.observers.fitted import EntryScorer
from kvfold.observers.stored import KeysBeforeRope


@register(
    "zap",
    paper="arXiv 2601.07891",
    formula="""
        s[l, h, t] = w[l, h]·(x, tanh(R·x)),  x = k[h, t] before RoPE, v[h, t], both norms, 1
        kept = sinks, the last window tokens, and the best of all layers and KV heads together
    """,
)
@dataclass(frozen=True)
class Zap(Method):
    """Keeps the entries that KVzip is expected to keep, by a scorer fitted on the same model.

    `kvfold fit MODEL TEXTS` learns, for each KV head, to predict KVzip's score of an entry from its
    key before RoPE, its value and their norms. Nothing is repeated and no query is read: one
    product per entry, in a prompt, while decoding ("zap + every"), and in a context
    that is stored already.

    `file` names the scorer; none: the one that comes with the bundled model. `level="pair"` ranks
    all entries in one pool, `"uniform"` keeps equally many in every head; with adakv, as in
    "zap:level=uniform + adakv", heads share a layer's size. The first `sinks` tokens and the last
    `window` stay; the window is smaller than KVzap's 128, as it counts in the budget.
    `floor=0.25` keeps a quarter of the budget equal among the heads of the pool.
    Different from KVzap, which reads hidden states: these are gone once an entry is stored.
    Raises KvfoldError for negative `sinks` or `window`, and for a `floor` out of range or not in a
    pool.
    Source: KVzap, linear variant; NVIDIA/kvpress `kvzap_press.py`.
    """

    by_head: ClassVar[bool] = True
    nested: ClassVar[bool] = True
    file: FileName = NO_FILE  # fitted scorer, none: the bundled model's
    level: Literal["pair", "uniform"] = "pair"  # pool of all entries, or equal heads
    sinks: int = 4  # first tokens that stay
    window: int = 16  # last tokens that stay
    floor: float = 0.0  # part of the mean size that every head keeps

    def __post_init__(self) -> None:
        self.check_range(0, None, "sinks", "window")
        self.check_range(0, 1, "floor")
        if self.floor and self.level != "pair":
            raise KvfoldError("zap:floor goes with a pool: choose level=pair")

    def stages(self) -> Stages:
        candidates = partial(candidates_of, score=learned)
        across = Across(
            candidates, partial(pooled, floor=self.floor), per_head=True, in_rounds=True
        )
        return Stages(
            needs=Needs(KeysBeforeRope(), EntryScorer(FittedFile(Scorer, str(self.file)))),
            score=learned,
            allocate=across if self.level == "pair" else uniform,
            forced=Forced(sinks=self.sinks, recent=self.window),
        )
