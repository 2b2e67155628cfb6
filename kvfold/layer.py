# SPDX-License-Identifier: Apache-2.0
"""One layer of the cache: stores what the model writes, and is compressed by its method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.budget import Budget
from kvfold.compat import CacheLayerMixin, Rotation
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.observation import Observation
from kvfold.owner import Owner
from kvfold.select.forced import with_forced
from kvfold.select.top import top
from kvfold.store.dense import DenseStore
from kvfold.store.sinks import MovingSinks
from kvfold.turn import Plan, Turn


@dataclass(frozen=True)
class Attended:
    """One attention call: what went in, as the attention function saw it, and column sums if asked.

    query `[B, Hq, S, D]`, key and value `[B, H, T, D]`, sums `[B, H, T]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    sums: Tensor | None = None


class CompressedLayer(CacheLayerMixin):
    """A full-attention layer: logical lengths outwards, kept entries inwards."""

    is_croppable = True
    is_sliding = False

    def __init__(self, plan: Plan, turn: Turn, owner: Owner, rotation: Rotation) -> None:
        self.plan, self.turn, self.owner, self.rotation = plan, turn, owner, rotation
        self.reset()

    # --- what transformers asks -------------------------------------------------------------

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        return None if self.store is None else self.store.keys

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        return None if self.store is None else self.store.values

    def reset(self) -> None:
        """Forgets everything."""
        self.store: DenseStore | None = None
        self.is_initialized = False
        self.seen = 0
        self.turns = 0
        self.evicted_at = 0  # tokens seen when something was last evicted
        self.valid: Tensor | None = None  # [B, N], False where the logical sequence is padding
        self.sums: Tensor | None = None  # [B, H, T], attention received so far
        self.capacity: Tensor | None = None  # [B], entries to hold while decoding
        self.window: Attended | None = None  # last queries of a turn that is still being read
        self.window_columns: Tensor | None = None  # [B, W]
        self.over_budget = False  # the forced set was larger than the budget
        self.sinks: MovingSinks | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.store = DenseStore(key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores new entries `[B, H, S, D]`; returns all that is stored."""
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        else:
            self.store.append(key_states, value_states, first=self.seen)
        self.seen += key_states.shape[2]
        assert self.store is not None
        if self.sinks is not None:
            self.sinks.follow(self.store, self._evicted_per_row())
        return self.store.keys, self.store.values

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens; raises KvfoldError past an eviction."""
        self.check_crop(tokens_to_remove)
        count = -tokens_to_remove
        if count == 0 or self.store is None:
            return
        self.store.crop(count)
        self.seen -= count
        if self.sums is not None:
            self.sums = self.sums[..., : self.store.length].clone()
        if self.valid is not None:
            self.valid = self.valid[:, : self.seen].clone()
        if self.sinks is not None:
            self.sinks.follow(self.store, self._evicted_per_row())

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raises KvfoldError where tokens cannot be taken back."""
        if tokens_to_remove > 0:
            raise KvfoldError(
                f"crop takes minus the number of tokens to drop, not {tokens_to_remove}"
            )
        if tokens_to_remove and self.store and self.seen + tokens_to_remove < self.evicted_at:
            raise KvfoldError(
                f"cannot take back {-tokens_to_remove} tokens: entries were evicted since; "
                "generate inside `with cache.frozen():` what is to be taken back"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._index(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._index(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._index(lambda x: x[indices.to(x.device)])

    def _index(self, rows: Callable[[Tensor], Tensor]) -> None:
        if self.store is None:
            return
        self.store.index(rows)
        for name in ("valid", "sums", "capacity", "window_columns"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, rows(tensor))
        if self.sinks is not None:
            self.sinks.index(rows)
        if self.window is not None:
            w = self.window
            self.window = dataclasses.replace(
                w, query=rows(w.query), key=rows(w.key), value=rows(w.value)
            )

    # --- what the attention function asks ---------------------------------------------------

    @property
    def sums_wanted(self) -> bool:
        """Whether this forward's column sums will be used."""
        return self.plan.stages.needs.column_sums and not self.turn.frozen

    def counted(self, new: int) -> Tensor | None:
        """Which of the last `new` queries are tokens `[B, S]`; None: all are."""
        return None if self.valid is None else self.valid[:, -new:]

    def finish(self, attended: Attended) -> None:
        """Called when the layer's attention is done: observes, and compresses when it is time."""
        if self.turn.frozen:
            return
        new = attended.query.shape[2]
        if attended.sums is not None:
            self._add_sums(attended.sums)
        if self.turn.ends(self.seen, new):
            self._compress(self._observation(attended))
            self.window = self.window_columns = None
        elif self.turn.goes_on(self.seen):
            self._remember(attended)
        elif self.plan.stages.decode == "hold" and self.plan.stages.score is not None:
            self._hold(attended)

    def end_turn(self) -> None:
        """Compresses after a `reading()` block, from what was remembered of it."""
        if self.window is None or self.store is None:
            return
        if self.window.key.shape[1] != self.store.keys.shape[1]:
            raise UnsupportedModel(
                "this model's cache holds latents, whose keys exist only inside a forward: name "
                "the turn's length, `with cache.reading(until=tokens):`, so that its last forward "
                "can compress"
            )
        stored = dataclasses.replace(self.window, key=self.store.keys, value=self.store.values)
        self._compress(self._observe(stored, self.window_columns))
        self.window = self.window_columns = None

    def state_bytes(self) -> int:
        """Bytes of all tensors beside the store."""
        tensors = [self.valid, self.sums, self.capacity, self.window_columns]
        if self.window is not None:
            tensors.append(self.window.query)
        if self.sinks is not None:
            tensors.append(self.sinks.given)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    # --- observe, score, allocate, select, store --------------------------------------------

    def _add_sums(self, sums: Tensor) -> None:
        assert self.store is not None
        sums = self._per_stored_head(sums)
        if self.sums is not None:
            sums[..., : self.sums.shape[-1]] += self.sums
        self.sums = sums

    def _per_stored_head(self, scores: Tensor) -> Tensor:
        """Mean over the attention heads that one stored head serves (several for latents)."""
        assert self.store is not None
        return scores.unflatten(1, (self.store.keys.shape[1], -1)).mean(2)

    def _remember(self, attended: Attended) -> None:
        """Adds the last queries of a turn's piece to those of its earlier pieces."""
        query, self.window_columns = self._joined(attended)
        # Of the keys only the number of heads is needed, not the entries.
        self.window = dataclasses.replace(
            attended,
            query=query.clone(),
            key=attended.key[:, :, :0].clone(),
            value=attended.value[:, :, :0].clone(),
            sums=None,
        )

    def _joined(self, attended: Attended) -> tuple[Tensor, Tensor]:
        """The turn's last queries `[B, Hq, W, D]` and their positions `[B, W]`, −1 for padding."""
        width = self.plan.stages.needs.window
        first = max(0, attended.query.shape[2] - width)
        query = attended.query[:, :, first:]
        start = self.seen - query.shape[2]
        positions = torch.arange(start, self.seen, device=query.device).repeat(len(query), 1)
        if self.valid is not None:
            positions = positions.masked_fill(~self.valid[:, start:], -1)
        if self.window is None or self.window_columns is None:
            return query, positions
        query = torch.cat([self.window.query, query], 2)
        positions = torch.cat([self.window_columns, positions], 1)
        # Padding of a later piece must not push out an earlier piece's tokens.
        order = (positions >= 0).long().argsort(dim=1, stable=True)
        order = order[:, max(0, order.shape[1] - width) :]
        wide = order[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        return query.gather(2, wide), positions.gather(1, order)

    def _observation(self, attended: Attended) -> Observation:
        query, positions = self._joined(attended)
        return self._observe(dataclasses.replace(attended, query=query), positions)

    def _observe(self, attended: Attended, query_columns: Tensor | None) -> Observation:
        assert self.store is not None
        latents = attended.key.shape[1] // self.store.keys.shape[1]
        places = self._places(self.columns()).repeat_interleave(latents, 1)
        sums = None if self.sums is None else self.sums.repeat_interleave(latents, 1)
        asked = None if query_columns is None else self._places(query_columns)
        return Observation(
            attended.key,
            attended.value,
            places,
            attended.query,
            asked,
            sums,
            scale=attended.scale,
            softcap=attended.softcap,
            sinks=attended.sinks,
            seed=hash((self.plan.seed, self.plan.layer, self.turns)) % 2**31,
        )

    def _tokens(self) -> Tensor | None:
        """Which columns are tokens `[B, N]`; columns whose mask is still to come count as such."""
        if self.valid is None:
            return None
        return F.pad(self.valid, (0, self.seen - self.valid.shape[1]), value=True)

    def columns(self) -> Tensor:
        """Logical columns of the stored entries `[B, H, T]`, −1 for padding."""
        assert self.store is not None
        columns, tokens = self.store.positions, self._tokens()
        if tokens is None:
            return columns
        real = tokens[:, None].expand(-1, columns.shape[1], -1).gather(2, columns.clamp(min=0))
        return columns.masked_fill(~real, -1)

    def seen_per_row(self) -> Tensor:
        """Tokens seen by each row `[B]`, padding left out."""
        assert self.store is not None
        tokens = self._tokens()
        if tokens is None:
            return torch.full((len(self.store.keys),), self.seen, device=self.store.keys.device)
        return tokens.sum(-1)

    def _evicted_per_row(self) -> Tensor:
        """Tokens seen but not stored `[B]`, where all heads store the same."""
        return self.seen_per_row() - (self.columns()[:, 0] >= 0).sum(-1)

    def _places(self, columns: Tensor) -> Tensor:
        """Columns → each one's number among its row's tokens; −1 stays."""
        tokens = self._tokens()
        if tokens is None:
            return columns
        count = tokens.cumsum(-1) - 1
        if columns.dim() == 3:
            count = count[:, None].expand(-1, columns.shape[1], -1)
        return count.gather(-1, columns.clamp(min=0)).masked_fill(columns < 0, -1)

    def _compress(self, seen: Observation) -> None:
        """Ends a turn: brings the layer back to its budget."""
        self.turns += 1
        if self.plan.stages.score is None:
            return
        assert self.store is not None
        counts = self.plan.counts(self.seen_per_row(), self.store)
        everything = self.plan.budget == Budget.ratio(1.0)
        self.capacity = None if everything else counts
        self._evict(seen, counts)

    def _hold(self, attended: Attended) -> None:
        """After a generated token: back to the size of the last turn's end."""
        assert self.store is not None and self.plan.budget is not None
        if self.capacity is None and self.turns == 0 and self.plan.budget.kind != "ratio":
            self.capacity = self.plan.counts(self.seen_per_row(), self.store)
        if self.capacity is not None:
            self.turns += 1
            self._evict(self._observation(attended), self.capacity)

    def _evict(self, seen: Observation, counts: Tensor) -> None:
        """Keeps the `counts[B]` best entries of each row, and whatever is forced to stay."""
        assert self.store is not None and self.plan.stages.score is not None
        places = self._places(self.columns())
        stored = (places >= 0).sum(-1).amax(-1)
        if bool((counts >= stored).all()):
            return
        seen, order = seen.padding_first()
        scores = self.plan.stages.score(seen)
        if order is not None:
            scores = torch.zeros_like(scores).scatter(2, order, scores)
        scores = self._per_stored_head(scores)
        forced = self.plan.stages.forced.mask(places, counts)
        needed = forced.sum(-1).amax(-1)
        self.over_budget = bool((needed > counts).any())
        counts = torch.minimum(torch.maximum(counts, needed), stored)
        slots = top(with_forced(scores, forced, places), counts)
        if self.sinks is not None:
            self.sinks.restore(self.store)
        self.store.keep(slots)
        self.evicted_at = self.seen
        if self.sums is not None:
            self.sums = self.sums.gather(2, slots.clamp(min=0)).masked_fill(slots < 0, 0.0)
        if self.plan.stages.positions == "reindex":
            self.sinks = MovingSinks(self.store, self.plan.stages.forced.sinks, self.rotation)
