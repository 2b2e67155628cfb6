# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from kvfold.methods.base import Method, Needs, Stages, register
from kvfold.methods.stages.score.chunk_attention import non_causal_scores
from kvfold.observers.chunk_sums import ChunkSumsNeed


@register(
    "non_causal",
    paper="arXiv 2507.08143",
    formula="""
        s[h, t] = mean_{u = t − 1 … t + 1} c[h, u]·‖v[h, u]‖
        c[h, t] = mean_{q in h} Σ_{i in chunk of t} softmax_{u in chunk of t} Q[q, i]·k[h, u]
    """,
)
@dataclass(frozen=True)
class NonCausal(Method):
    """Keeps the entries that the queries of their chunk attend to, later and earlier ones alike.

    1. Each `chunk` tokens of a prompt attend to one another, without a mask or a scale.
    2. What an entry receives is multiplied by the norm of its value, and averaged with its two
       neighbours.

    Generated tokens are in no chunk: they count as if they received 1, the mean. Different from
    kvpress: padding and a short last chunk are masked, and scores are not standardized, which
    changes no order. Raises KvfoldError for a chunk below 1.
    Source: Chari and Van Durme, section 3; NVIDIA/kvpress `non_causal_attention_press.py`.
    """

    by_head: ClassVar[bool] = True
    chunk: int = 256  # tokens that attend to one another

    def __post_init__(self) -> None:
        self.check_range(1, None, "chunk")

    def stages(self) -> Stages:
        return Stages(needs=Needs(ChunkSumsNeed(self.chunk)), score=non_causal_scores)
