# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from kvfold.errors import KvfoldError
from kvfold.methods.base import Forced, Method, Needs, Stages, register, uniform, when_of
from kvfold.methods.stages.score.observation_window import (
    Pooling,
    candidate_votes,
    check_window,
    mean_votes,
)
from kvfold.observers.last_queries import LastQueries


@register(
    "snapkv",
    paper="arXiv 2404.14469",
    formula="s[h, t] = pool_{u near t} Σ_{i in window} a[h, i, u]",
    presets={
        "official": {"window": 64, "kernel": 5, "pooling": "avg"},
        "kvpress": {"window": 64, "kernel": 5, "pooling": "avg", "pool_first": True},
        "decode": {"window": 8, "votes": "logits", "decode": "every"},
    },
)
@dataclass(frozen=True)
class SnapKV(Method):
    """The prompt's last queries vote for the tokens to keep; votes are pooled over neighbours.

    1. The attention of the last `window` queries to each earlier token is summed: its votes.
    2. The mean over the query heads of a KV head is pooled with `kernel`.
    3. Each KV head keeps the window and the tokens with most votes, inside the budget.

    Generated tokens are added to that. Defaults are the paper's LongBench setting;
    `snapkv_official` holds the released code's class defaults, `snapkv_kvpress` those of kvpress,
    which pools before the mean. `snapkv_decode` compresses generated tokens too, after each 128 of
    them, by the rule of R-KV's repository: a query votes by the largest logit of the query heads,
    softmax over the entries before the window. Raises KvfoldError for a window below 1, a kernel
    that is not odd, and `pool_first` of votes by logits.
    Source: Li et al., section 4; FasterDecoding/SnapKV `snapkv_utils.py`.
    """

    by_head: ClassVar[bool] = True
    nested: ClassVar[bool] = True
    window: int = 32  # last queries that vote; their entries always stay
    kernel: int = 7  # neighbours that votes are pooled over, odd
    pooling: Pooling = "max"  # how votes are pooled
    pool_first: bool = False  # pools each query head before the group's mean
    votes: Literal["attention", "logits"] = "attention"  # mean of the query heads, or their largest
    decode: Literal["append", "every"] = "append"  # adds generated tokens, or evicts in rounds

    def __post_init__(self) -> None:
        check_window(self.window, self.kernel)
        if self.pool_first and self.votes == "logits":
            raise KvfoldError("snapkv:votes=logits has no votes of single heads to pool_first")

    def stages(self) -> Stages:
        options: dict[str, Any] = {
            "window": self.window,
            "kernel": self.kernel,
            "pooling": self.pooling,
        }
        if self.votes == "logits":
            score = partial(candidate_votes, **options)
        else:
            score = partial(mean_votes, **options, pool_first=self.pool_first)
        return Stages(
            needs=Needs(LastQueries(self.window)),
            score=score,
            allocate=uniform,
            forced=Forced(recent=self.window),
            when=when_of(self.decode),
        )
