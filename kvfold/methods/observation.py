# SPDX-License-Identifier: Apache-2.0
"""`Observation`: a layer's data for a method's stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from warnings import warn

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.gather import pick, take
from kvfold.kernels.mean_rotation import Rotate, mean_rotation
from kvfold.kernels.query_moments import QueryMoments
from kvfold.observers.base import Need, kind_of
from kvfold.observers.fitted import EntryScorer
from kvfold.observers.query_moments import QueryMomentsNeed
from kvfold.observers.stored import KeysBeforeRope, OutputNorms

V = TypeVar("V")


@dataclass(frozen=True)
class Observation:
    """One layer's entries, window queries, and what its observers give: `observation[kind]`.

    In decode eviction, layers of one shape are joined for scores with `only_attention`: their rows
    follow one another in B, and keys, values and positions hold no entries (T is 0).
    """

    keys: Tensor  # [B, H, T, D], after RoPE
    values: Tensor  # [B, H, T, Dv]
    positions: Tensor  # [B, H, T], −1 for padding and holes; int64, in decode eviction int32
    queries: Tensor | None = None  # [B, Hq, W, D], the last W, of LastQueries(W)
    query_positions: Tensor | None = None  # [B, W], −1 for padding
    attention: Tensor | None = None  # [B, Hq, 1, T], weights of a decode step's query
    observed: Mapping[type[Need[Any]], Any] = field(default_factory=dict)
    tokens_seen: Tensor | None = None  # [B], without padding
    budget: Tensor | None = None  # [B], entries that each head of a row may keep
    # [B, H, T], for sizes of heads across layers: +∞ at forced entries, −∞ at padding and in the
    # prefix, 0 elsewhere
    candidates: Tensor | None = None
    evictable: Tensor | None = None  # [B, H, T], bool: entries that this eviction may take
    layer: int = 0  # index among `layers`
    layers: int = 1
    scale: float = 1.0  # of the logits
    softcap: float | None = None
    sink_logits: Tensor | None = None  # [Hq] (GPT-OSS)
    seed: int = 0  # of this eviction's random draws
    rotate: Rotate | None = None  # the layer's RoPE; see `unrotated`
    bias: Tensor | None = None  # [B, H, T], float32, added to the entries' logits
    most_queries: int | None = None  # that a stage may read, W; None: all there are

    def __getitem__(self, kind: type[Need[V]]) -> V:
        """The value of a kind; raises KvfoldError for a method that does not need it."""
        value: V | None = self.observed.get(kind)
        if value is None:
            raise KvfoldError(f"{kind.words} are for methods with Needs({kind.__name__}(…))")
        return value

    def get(self, kind: type[Need[V]]) -> V | None:
        """The value of a kind; None where there is none."""
        return self.observed.get(kind)

    def __getattr__(self, name: str) -> Any:
        kind = None if name.startswith("_") else kind_of(name, "field")
        if kind is None:
            raise AttributeError(f"an observation has no {name}")
        new = f"observation[{kind.__name__}]"
        warn(f"observation.{name} is {new} now", DeprecationWarning, stacklevel=2)
        return self.get(kind)

    def padding_first(self) -> tuple[Observation, Tensor | None]:
        """Observation with padding moved to the left, and the slots `[B, H, T]` in that order.

        The order is None if padding is on the left already.
        """
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
            observed={
                kind: value if kind.empty is None else moved(value)
                for kind, value in self.observed.items()
            },
            candidates=moved(self.candidates),
            evictable=moved(self.evictable),
            bias=moved(self.bias),
        )
        return again, order

    @property
    def window(self) -> int:
        """Number of window queries W; 0 if there are none."""
        return 0 if self.queries is None else self.queries.shape[2]

    def at(self, slots: Tensor) -> Observation:
        """Observation of the entries at `slots [B, H, K]` only, −1 for holes."""
        return dataclasses.replace(
            self,
            keys=take(self.keys, slots),
            values=take(self.values, slots),
            positions=pick(self.positions, slots, -1),
            attention=None,
            observed={
                kind: value if kind.empty is None else pick(value, slots, kind.empty)
                for kind, value in self.observed.items()
            },
            candidates=None,
            evictable=None,
            bias=None if self.bias is None else pick(self.bias, slots, 0),
        )

    def unrotated(self) -> Tensor:
        """Keys `[B, H, T, D]` before RoPE, float32; its attention factor (YaRN) stays inside them.

        Raises KvfoldError for a method that does not need them.
        """
        at, rotate = self[KeysBeforeRope], self.rotate
        assert rotate is not None
        at = at[:, 0] if at.stride(1) == 0 else at  # angles of one head serve all
        return rotate(self.keys.float(), -at)

    def future_query_moments(self, future: int) -> QueryMoments:
        """Moments of the prefill's queries, turned by the mean rotation of the next positions.

        These are the `future` positions after each row's last token. Raises KvfoldError for a
        method that does not need moments of queries.
        """
        moments, size = self[QueryMomentsNeed], self.keys.shape[-1]
        assert self.rotate is not None and self.tokens_seen is not None
        return moments.turned(mean_rotation(self.rotate, self.tokens_seen, future, size))

    def output_norms(self) -> Tensor:
        """‖W_o v‖ `[B, Hq, T]`, float32: norms of values as each query head projects them.

        L1 or L2 norms in the model's dimension, as `OutputNorms` says; of padding, any
        number. Raises KvfoldError for a method that does not need them.
        """
        return self[OutputNorms](self.values)

    def learned_scores(self) -> Tensor:
        """Scores `[B, H, T]`, float32, of the fitted scorer; of padding, any number.

        Raises KvfoldError for a method that does not need one.
        """
        return self[EntryScorer](self)

    def window_logits(self, last: int) -> Tensor:
        """Logits `[B, H, G, last, T]` of the last queries, float32; of hidden entries too.

        Raises KvfoldError as `window_attention`.
        """
        self._check_window(last)
        assert self.queries is not None
        queries = self.queries[:, :, -last:]
        batch, _, window, size = queries.shape
        heads, stored = self.keys.shape[1:3]
        # Products of queries and keys may exceed float16 before they are scaled.
        grouped = queries.reshape(batch, heads, -1, size) * self.scale
        logits = (grouped @ self.keys.transpose(-1, -2)).float()
        logits = logits.view(batch, heads, -1, window, stored)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if self.bias is not None:
            logits = logits + self.bias[:, :, None, None]
        return logits

    def window_attention(self, last: int) -> Tensor:
        """Attention weights `[B, Hq, last, T]` of the last queries, float32.

        Queries that see no stored entry, as padding, have rows of 0. Fewer rows for a text of fewer
        tokens. Raises KvfoldError for more queries than the method needs.
        """
        if last == 1 and self.attention is not None:
            return self.attention
        logits = self.window_logits(last)
        assert self.query_positions is not None
        at = self.query_positions[:, -last:]
        entries = self.positions[:, :, None, None, :]
        hidden = (entries < 0) | (entries > at[:, None, None, :, None])
        logits = logits.masked_fill(hidden, -torch.inf).flatten(1, 2)
        if self.sink_logits is not None:
            extra = self.sink_logits.float().view(1, -1, 1, 1)
            extra = extra.expand(len(logits), -1, logits.shape[2], 1)
            rows = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
        else:
            rows = logits.softmax(-1)
        blind, grouped = hidden.all(-1, keepdim=True), rows.unflatten(1, (entries.shape[1], -1))
        seen: Tensor = grouped.masked_fill(blind, 0.0).flatten(1, 2)
        return seen

    def _check_window(self, last: int) -> None:
        """Raises KvfoldError for no queries, and for more than the method needs."""
        most = 0 if self.queries is None else self.most_queries
        if last < 1:
            raise KvfoldError(f"an observation window is at least 1 query, not {last}")
        if most is not None and last > most:
            raise KvfoldError(
                f"attention of the last {last} queries is for methods with "
                f"Needs(LastQueries({last})) or more: this one has LastQueries({most})"
            )

    def group_mean(self, per_query_head: Tensor) -> Tensor:
        """Mean over the query heads of each group: `[B, Hq, …]` → `[B, H, …]`."""
        heads = self.keys.shape[1]
        grouped: Tensor = per_query_head.unflatten(1, (heads, -1))
        return grouped.mean(2)
