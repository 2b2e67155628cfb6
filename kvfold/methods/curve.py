# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass, replace
from typing import ClassVar

from kvfold.methods.base import Across, FileName, Method, Stages, register
from kvfold.methods.expected_attention import ExpectedAttention
from kvfold.methods.fitted import FittedFile
from kvfold.methods.stages.allocate.parts import Curve, bounds, by_parts

NO_FILE = FileName("none")


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
    """Sizes of KV heads by what a score's choices are worth there, profiled on the same model.

    `kvfold fit MODEL TEXTS --scorer "snapkv + curve"` takes KVzip's score as an entry's utility and
    the other method's score as its rank. Heads whose best ranks hold the most utility get the most:
    the budget is spent greedily by the slope of each head's upper concave hull. The parts, averaged
    over texts, are stored for each budget. `file` names them, "snapkv + curve:file=FILE"; none:
    those that come with the bundled model. A file is for the score that it was fitted with.

    Alone it scores by expected attention, as published. Different from kvpress: parts between two
    rows are interpolated, and one largest remainder over all heads meets the budget; the other
    method says which entries are forced. Raises ScorerFileError, when a cache is made, for a file
    that is damaged or of another model, RoPE or dtype.
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
        return Across(bounds, by_parts, per_head=True, unrounded=True, parts=parts)
