# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from kvfold.fitted.numbers import NO_FILE, FileName, FittedFile
from kvfold.methods.base import Method, Needs, Stages, register, uniform
from kvfold.methods.stages.score.filters import Filters
from kvfold.methods.stages.score.learned import learned
from kvfold.observers.fitted import EntryScorer


@register("qfilter", paper="arXiv 2503.02812", formula="s[l, h, t] = ⟨k[l, h, t], u[l, h]⟩")
@dataclass(frozen=True)
class QFilter(Method):
    """Keeps the entries whose keys point where the head's queries do, by a fitted direction.

    `kvfold fit MODEL TEXTS --scorer qfilter` reads the queries of some texts and stores one
    direction u for each KV head: the first right singular vector of its queries after RoPE, with
    the sign of the mean query. No query is read later: one product per key, in a prompt, with
    `every` while decoding, and in a context that is stored already.

    `file` names the filters; none: those that come with the bundled model.
    Source: Godey et al., section 3; NVIDIA/kvpress `qfilter_press.py`, whose published filters have
    the opposite sign.
    """

    by_head: ClassVar[bool] = True
    nested: ClassVar[bool] = True
    file: FileName = NO_FILE  # fitted filters, none: the bundled model's

    def stages(self) -> Stages:
        scorer = FittedFile(Filters, str(self.file))
        return Stages(needs=Needs(EntryScorer(scorer)), score=learned, allocate=uniform)
