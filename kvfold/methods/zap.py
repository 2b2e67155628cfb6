# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from kvfold.errors import KvfoldError
from kvfold.methods.base import Across, FileName, Method, Stages, register
from kvfold.methods.fitted import FittedFile
from kvfold.methods.observation import Needs
from kvfold.methods.stages.allocate.pool import candidates_of, pooled
from kvfold.methods.stages.allocate.uniform import uniform
from kvfold.methods.stages.score.learned import Scorer, learned
from kvfold.methods.stages.select.forced import Forced

NO_FILE = FileName("none")


@register(
    "zap",
    paper="arXiv 2601.07891",
    formula="""
        s[l, h, t] = w[l, h]·(x, tanh(R·x)),  x = k[h, t] before RoPE, v[h, t], both norms, 1
        kept = the best L·H·mean size of all layers and KV heads together
    """,
)
@dataclass(frozen=True)
class Zap(Method):
    """Keeps the entries that KVzip is expected to keep, by a scorer fitted on the same model.

    `kvfold fit MODEL TEXTS` learns, for each KV head, what KVzip would score from an entry's key
    before RoPE, its value and their norms. Nothing is repeated and no query is read: one product
    per entry, in a prompt, with `every` while decoding, and in a context that is stored already.

    `file` names the scorer; none: the one that comes with the bundled model. `level="pair"` ranks
    all entries in one pool, `"uniform"` keeps equally many in every head; with adakv, as in
    "zap:level=uniform + adakv", heads share a layer's size. The first `sinks` tokens stay.
    Different from KVzap, which reads hidden states: these are gone once an entry is stored.
    Raises KvfoldError for negative `sinks`.
    Source: KVzap, linear variant; NVIDIA/kvpress `kvzap_press.py`.
    """

    by_head: ClassVar[bool] = True
    nested: ClassVar[bool] = True
    file: FileName = NO_FILE  # fitted scorer, none: the bundled model's
    level: Literal["pair", "uniform"] = "pair"  # pool of all entries, or equal heads
    sinks: int = 4  # first tokens that stay

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise KvfoldError(f"zap:sinks is 0 or more, not {self.sinks}")

    def stages(self) -> Stages:
        across = Across(partial(candidates_of, score=learned), pooled, per_head=True)
        return Stages(
            needs=Needs(unrotated=True, scorer=FittedFile(Scorer, str(self.file))),
            score=learned,
            allocate=across if self.level == "pair" else uniform,
            forced=Forced(sinks=self.sinks),
        )
