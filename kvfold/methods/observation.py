# SPDX-License-Identifier: Apache-2.0
"""What a method gets to see of one layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.kernels.gather import pick, take
from kvfold.store.entry_norms import On


@dataclass(frozen=True)
class ContextReconstruction:
    """How a text is repeated to the model: in parts of `chunk` tokens, asked for in words.

    `later` parts are asked for with the `previous` tokens before them. `instruction` stands before
    the text and is kept beside the budget. With a file of `head_scores` nothing is repeated.
    """

    chunk: int
    first: str
    later: str
    previous: int
    instruction: str = ""
    head_scores: str | None = None


@dataclass(frozen=True)
class Needs:
    """What must be remembered while the model runs; nothing is computed that nobody asked for."""

    window: int = 0  # the turn's last queries
    column_sums: bool = False  # attention that each entry received, summed over all queries
    column_squares: bool = False  # the same, squared before it is summed
    reconstruction: ContextReconstruction | None = (
        None  # most attention received while the text is repeated
    )
    only_attention: bool = False  # the score looks at nothing else, and not at its layer's number
    norms: On | None = None  # of these, for single entries that leave

    def joined(self, other: Needs) -> Needs:
        """What serves both."""
        return Needs(
            max(self.window, other.window),
            self.column_sums or other.column_sums,
            self.column_squares or other.column_squares,
            self.reconstruction or other.reconstruction,
            self.only_attention or other.only_attention,
            self.norms or other.norms,
        )


@dataclass(frozen=True)
class Observation:
    """One layer as its attention saw it.

    Where a score looks at attention only, layers of one shape are shown as one after a generated
    token: their rows one after the other, and no entries (T is 0 in keys, values and positions).
    """

    keys: Tensor  # [B, H, T, D], after RoPE
    values: Tensor  # [B, H, T, Dv]
    # [B, H, T], an entry's number among its row's tokens, −1 for padding and holes; int64, or int32
    # after a generated token, where a hole may keep its number
    positions: Tensor
    queries: Tensor | None = None  # [B, Hq, W, D], the last W of the prefill, W = Needs.window
    query_positions: Tensor | None = None  # [B, W], −1 for padding
    attention: Tensor | None = None  # [B, Hq, 1, T], the single query's row, where it was watched
    column_sums: Tensor | None = None  # [B, H, T], over all queries, of the mean over the group
    column_squares: Tensor | None = None  # [B, H, T], the same of squares
    # [B, H, T], the most attention received while the context was repeated, over the group
    reconstruction: Tensor | None = None
    tokens_seen: Tensor | None = None  # [B], padding left out
    budget: Tensor | None = None  # [B], entries that each head of a row may keep
    layer: int = 0  # among `layers`
    layers: int = 1
    scale: float = 1.0  # of the logits
    softcap: float | None = None
    sinks: Tensor | None = None  # [Hq], logits of attention sinks (GPT-OSS)
    seed: int = 0  # of this draw

    def padding_first(self) -> tuple[Observation, Tensor | None]:
        """The same with each row's padding to the left, and the order `[B, H, T]` that did it."""
        padding = self.positions < 0
        if not bool((padding[..., 1:] & ~padding[..., :-1]).any()):
            return self, None
        order = (~padding).long().argsort(stable=True, dim=-1)

        def moved(per_entry: Tensor | None) -> Tensor | None:
            return None if per_entry is None else per_entry.gather(2, order)

        again = dataclasses.replace(
            self,
            keys=take(self.keys, order),
            values=take(self.values, order),
            positions=self.positions.gather(2, order),
            attention=None,
            column_sums=moved(self.column_sums),
            column_squares=moved(self.column_squares),
            reconstruction=moved(self.reconstruction),
        )
        return again, order

    @property
    def window(self) -> int:
        """How many queries were remembered."""
        return 0 if self.queries is None else self.queries.shape[2]

    def at(self, slots: Tensor) -> Observation:
        """The same with the entries at `slots [B, H, K]` only; −1 is a hole."""
        return dataclasses.replace(
            self,
            keys=take(self.keys, slots),
            values=take(self.values, slots),
            positions=pick(self.positions, slots, -1),
            attention=None,
            column_sums=None,
            column_squares=None,
            reconstruction=None,
        )

    def window_attention(self, last: int) -> Tensor:
        """Attention rows `[B, Hq, W, T]` of the last `last` queries, float32; 0 for padding."""
        if last == 1 and self.attention is not None:
            return self.attention
        assert self.queries is not None and self.query_positions is not None
        queries, at = self.queries[:, :, -last:], self.query_positions[:, -last:]
        batch, query_heads, window, size = queries.shape
        heads, stored = self.keys.shape[1:3]
        grouped = queries.reshape(batch, heads, -1, size)
        logits = (grouped @ self.keys.transpose(-1, -2)).float() * self.scale
        logits = logits.view(batch, heads, -1, window, stored)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        columns = self.positions[:, :, None, None, :]
        hidden = (columns < 0) | (columns > at[:, None, None, :, None])
        logits = logits.masked_fill(hidden, -torch.inf).view(batch, query_heads, window, stored)
        if self.sinks is not None:
            extra = self.sinks.float().view(1, -1, 1, 1).expand(batch, -1, window, 1)
            rows = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
        else:
            rows = logits.softmax(-1)
        return rows.masked_fill((at < 0)[:, None, :, None], 0.0)

    def group_mean(self, per_query_head: Tensor) -> Tensor:
        """`[B, Hq, …]` → `[B, H, …]`: mean over the query heads that share a KV head."""
        heads = self.keys.shape[1]
        grouped: Tensor = per_query_head.unflatten(1, (heads, -1))
        return grouped.mean(2)
