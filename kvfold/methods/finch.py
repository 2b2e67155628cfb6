# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from kvfold.methods.base import Forced, LastQueries, Method, Needs, Observation, Stages, register
from kvfold.methods.stages.score.observation_window import check_window
from kvfold.methods.stages.select.blocks import best_of_chunks

Weight = Literal["visible", "before", "none"]


@register(
    "finch",
    paper="arXiv 2408.00167",
    presets={"kvpress": {"weight": "before"}},
    formula="""
        s[h, t] = mean_{i in window} w[i]·a[h, i, t],  w[i] = visible entries of query i
        position of a head's entry j of b = n − b + j
    """,
)
@dataclass(frozen=True)
class Finch(Method):
    """The question's queries choose the entries, which then move to consecutive positions.

    1. The last `window` queries are those of the question, when prompt and question are compressed
       together: set `window` to the question's number of tokens.
    2. A query's row of attention is multiplied by the number of entries that it sees, so that the
       first queries, which see fewer, do not outweigh the last. The mean over the rows and over the
       query heads of a KV head is the score; the window always stays.
    3. The kept keys are rotated to consecutive positions right before the next token, in float32.

    With `chunk` each chunk of so many tokens keeps the same part. `weight="before"` multiplies by
    the entries before the query's own, as kvpress does; `positions="original"` moves nothing.
    Different from kvpress: no delimiter token is put into the prompt, the budget is met with
    `chunk` too, and any number of rows has padding and later turns. Raises KvfoldError for a window
    below 1 or a negative chunk.
    Source: Corallo and Papotti, section 3; NVIDIA/kvpress `finch_press.py`.
    """

    by_head: ClassVar[bool] = True
    window: int = 32  # last queries, those of the question; their entries always stay
    chunk: int = 0  # tokens of which each keeps the same part, 0: the whole text at once
    weight: Weight = "visible"  # factor of a query's row: entries seen, those before it, or 1
    positions: Literal["reindex", "original"] = "reindex"  # consecutive, or those of the text

    def __post_init__(self) -> None:
        check_window(self.window, 1)
        self.check_range(0, None, "chunk")

    def stages(self) -> Stages:
        return Stages(
            needs=Needs(LastQueries(self.window)),
            score=partial(weighted_rows, window=self.window, weight=self.weight),
            forced=Forced(recent=self.window),
            select=partial(best_of_chunks, length=self.chunk) if self.chunk else None,
            positions="consecutive" if self.positions == "reindex" else "original",
        )


def weighted_rows(observation: Observation, window: int, weight: Weight) -> Tensor:
    """Attention of the last `window` queries `[B, H, T]`, float32, mean of the weighted rows.

    Padding among the queries is no row. The window's own entries score 0, as they are forced.
    """
    observation, order = observation.padding_first()
    assert observation.query_positions is not None
    rows = observation.window_attention(window).unflatten(1, (observation.keys.shape[1], -1))
    at, places = observation.query_positions[:, -window:], observation.positions
    if weight != "none":
        seen = (places[:, :, None] >= 0) & (places[:, :, None] <= at[:, None, :, None])
        factors = seen.sum(-1) - int(weight == "before")  # [B, H, W]
        rows = rows * factors[:, :, None, :, None]
    queries = (at >= 0).sum(-1).clamp(min=1).view(-1, 1, 1)
    scores = (rows.sum(3).mean(2) / queries)[..., :-window]
    scores = F.pad(scores, (0, places.shape[-1] - scores.shape[-1]))
    return scores if order is None else scores.new_zeros(scores.shape).scatter(2, order, scores)
