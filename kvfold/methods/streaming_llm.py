# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvfold.methods.base import Forced, Method, Stages, register, uniform, when_of
from kvfold.methods.stages.score.position import recency


@register(
    "streaming_llm",
    paper="arXiv 2309.17453",
    presets={"original": {"positions": "original"}},
    formula="""
        kept = 0 … sinks − 1 and n − b + sinks … n − 1
        position of sink i = n − b + i
    """,
)
@dataclass(frozen=True)
class StreamingLLM(Method):
    """Keeps the first tokens and the most recent ones, with consecutive positions.

    `positions="reindex"` is the paper's: at every step the kept tokens have consecutive positions.
    `positions="original"` is the baseline of most compression papers, with `decode="append"` their
    prefill-only form. The `sinks` first tokens count in the budget. Raises KvfoldError for negative
    sinks.
    Source: Xiao et al., section 3.2; mit-han-lab/streaming-llm `kv_cache.py`.
    """

    by_head: ClassVar[bool] = True
    nested: ClassVar[bool] = True
    sinks: int = 4  # first tokens that stay
    positions: Literal["reindex", "original"] = "reindex"  # consecutive, or those of the text
    decode: Literal["hold", "append"] = "hold"  # holds its size while decoding, or adds to it

    def __post_init__(self) -> None:
        self.check_range(0, None, "sinks")

    def stages(self) -> Stages:
        return Stages(
            score=recency,
            allocate=uniform,
            forced=Forced(sinks=self.sinks),
            when=when_of(self.decode),
            positions=self.positions,
        )
