# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass, replace
from typing import ClassVar

from kvfold.fitted.numbers import NO_FILE, FileName, FittedFile
from kvfold.methods.base import Across, Method, Stages, register
from kvfold.methods.expected_attention import ExpectedAttention
from kvfold.methods.stages.allocate.parts import Curve, bounds, by_parts


@register(
    "curve",
    paper="arXiv 2602.08585",
    formula="""
        size[l, h] = λ·part[l, h] at the budget, from the forced entries to n
        part: greedy by the slope of hull_k Σ_{i < k} u[i],  u = utility in the score's order
    """,
)
@dataclass(frozen=True)
class LUKV(Method):
    """Sizes of KV heads by the utility of a score's choices, profiled on the same model.

    `kvfold fit MODEL TEXTS --scorer "snapkv + curve"` takes KVzip's score as an entry's utility and
    the other method's score as its rank. Heads whose best ranks hold the most utility get the most:
    the budget is spent greedily by the slope of the upper concave hull of each head's cumulative
    utility. The parts, averaged over texts, are stored for each budget. `file` names their file,
    "snapkv + curve:file=FILE"; none: those of the bundled model. A file is for the method that it
    was fitted for.

    Alone it scores by expected attention, as published. Different from kvpress: parts between two
    stored budgets are interpolated, and rounded over all heads together, so that the budget is met;
    the other method says which entries are forced. Raises ScorerFileError, when a cache is made,
    for a file that is damaged or of another model, RoPE or dtype.
    Source: LU-KV, section 4; NVIDIA/kvpress `lukv_press.py`.
    """

    by_head: ClassVar[bool] = True
    file: FileName = NO_FILE  # fitted curve, none: the bundled model's

    def stages(self) -> Stages:
        return replace(ExpectedAttention(epsilon=0.02).stages(), allocate=self._sizes())

    def brings(self) -> Stages:
        return Stages(allocate=self._sizes())

    def _sizes(self) -> Across:
        parts = FittedFile(Curve, str(self.file))
        return Across(bounds, by_parts, per_head=True, unrounded=True, in_rounds=True, parts=parts)
