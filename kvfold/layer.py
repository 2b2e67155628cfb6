# SPDX-License-Identifier: Apache-2.0
"""One layer of the cache: stores what the model writes, and is compressed by its method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.budget import Budget
from kvfold.compat import CacheLayerMixin, Rotation
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.method import Stages
from kvfold.observation import Observation
from kvfold.owner import Owner
from kvfold.select.forced import with_forced
from kvfold.select.top import top
from kvfold.store.dense import DenseStore


@dataclass
class Turn:
    """Where the conversation stands; shared by all layers of a cache.

    `until` is the number of tokens at which a turn that is read piece by piece ends.
    """

    reading: bool = False
    frozen: bool = False
    until: int = 0

    def ends(self, seen: int, new: int) -> bool:
        """Whether a forward of `new` tokens that reached `seen` completes a turn."""
        if seen < self.until or self.reading:
            return False
        return new > 1 or seen - new < self.until


@dataclass(frozen=True)
class Plan:
    """What a layer must know of its cache: method, budget, place, and the draw of random scores."""

    stages: Stages
    budget: Budget | None
    layer: int
    layers: int
    seed: int

    def counts(self, seen: Tensor, store: DenseStore) -> Tensor:
        """Entries per KV head that each row may keep `[B]`, from its tokens seen `[B]`."""
        assert self.budget is not None and self.stages.allocate is not None
        keys, values = store.keys, store.values
        entry = (keys.shape[-1] + values.shape[-1]) * keys.element_size() + 4
        per_row = []
        for tokens in seen.tolist():
            total = self.budget.per_layer(tokens, entry, self.layers, keys.shape[1], len(seen))
            per_row.append(self.stages.allocate(total, tokens, self.layers)[self.layer])
        return torch.tensor(per_row, device=keys.device)


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
        self.valid: Tensor | None = None  # [B, N], False where the logical sequence is padding
        self.sums: Tensor | None = None  # [B, H, T], attention received so far
        self.capacity: Tensor | None = None  # [B], entries to hold while decoding
        self.window: Attended | None = None  # last queries of a turn that is still being read
        self.window_positions: Tensor | None = None  # [B, W]
        self.over_budget = False  # the forced set was larger than the budget
        self.sink_keys: Tensor | None = None  # [B, H, sinks, D], as given, where sinks move

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
        if self.sink_keys is not None:
            self._move_sinks()
        assert self.store is not None
        return self.store.keys, self.store.values

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens; raises KvfoldError where they were evicted."""
        count = -tokens_to_remove
        if count < 0:
            raise KvfoldError(f"crop takes minus the number of tokens to drop, not {-count}")
        if count == 0 or self.store is None:
            return
        tail = self.store.positions[..., -count:]
        wanted = torch.arange(self.seen - count, self.seen, device=tail.device)
        if tail.shape[-1] < count or not bool((tail == wanted).all()):
            raise KvfoldError(
                f"cannot take back {count} tokens: some of them were already evicted; "
                "generate inside `with cache.frozen():` what is to be taken back"
            )
        self.store.crop(count)
        self.seen -= count
        if self.sums is not None:
            self.sums = self.sums[..., : self.store.length].clone()
        if self.valid is not None:
            self.valid = self.valid[:, : self.seen].clone()
        if self.sink_keys is not None:
            self._move_sinks()

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
        for name in ("valid", "sums", "capacity", "sink_keys", "window_positions"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, rows(tensor))
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

    def note_padding(self, mask: Tensor | None) -> None:
        """Learns from a logical mask `[B, ·, S, N]` which columns are padding."""
        if mask is None:
            return
        last = mask[:, 0, -1]
        valid = last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2
        # A copy: a view would keep the whole mask alive.
        self.valid = None if bool(valid.all()) else valid.clone()

    def physical_mask(
        self, mask: Tensor | None, positions: Tensor | None, query: Tensor
    ) -> Tensor | None:
        """The logical mask `[B, 1 or Hq, S, N]` → the mask of what is stored `[B, Hq, S, T]`.

        `positions [B, H, T]` are those of the keys handed out; None while nothing was evicted.
        """
        if positions is None:
            return mask
        batch, heads, stored = positions.shape
        query_heads, new = query.shape[1:3]
        where = positions.long().clamp(min=0)[:, :, None].expand(batch, heads, new, stored)
        if mask is not None:
            per_head = mask[:, :1].expand(batch, heads, new, -1)
            if mask.shape[1] > 1:
                per_head = mask.expand(batch, -1, -1, -1)
                where = where.repeat_interleave(query_heads // heads, 1)
            physical = per_head.gather(-1, where)
        elif new > 1:
            at = torch.arange(self.seen - new, self.seen, device=positions.device)
            physical = where <= at[:, None]
        elif bool((positions[..., 0] < 0).any()):
            physical = torch.ones_like(where, dtype=torch.bool)
        else:
            return None
        if physical.shape[1] != query_heads:
            physical = physical.repeat_interleave(query_heads // heads, 1)
        hole = (positions < 0).repeat_interleave(query_heads // heads, 1)[:, :, None]
        nothing = False if physical.dtype == torch.bool else torch.finfo(physical.dtype).min
        return physical.masked_fill(hole, nothing)

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
            self.window = self.window_positions = None
        elif self.turn.reading or self.seen < self.turn.until:
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
        self._compress(self._observe(stored, self.window_positions))
        self.window = self.window_positions = None

    def state_bytes(self) -> int:
        """Bytes of all tensors beside the store."""
        tensors = [self.valid, self.sums, self.capacity, self.window_positions, self.sink_keys]
        if self.window is not None:
            tensors.append(self.window.query)
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
        query, self.window_positions = self._joined(attended)
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
        if self.window is None or self.window_positions is None:
            return query, positions
        query = torch.cat([self.window.query, query], 2)
        positions = torch.cat([self.window_positions, positions], 1)
        # Padding of a later piece must not push out an earlier piece's tokens.
        order = (positions >= 0).long().argsort(dim=1, stable=True)
        order = order[:, max(0, order.shape[1] - width) :]
        wide = order[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
        return query.gather(2, wide), positions.gather(1, order)

    def _observation(self, attended: Attended) -> Observation:
        query, positions = self._joined(attended)
        return self._observe(dataclasses.replace(attended, query=query), positions)

    def _observe(self, attended: Attended, query_positions: Tensor | None) -> Observation:
        heads = attended.key.shape[1]
        positions = self._token_positions()
        sums = self.sums
        if positions.shape[1] != heads:
            positions = positions.expand(-1, heads, -1)
            sums = None if sums is None else sums.expand(-1, heads, -1)
        return Observation(
            attended.key,
            attended.value,
            positions,
            attended.query,
            query_positions,
            sums,
            attended.scale,
            attended.softcap,
            attended.sinks,
            seed=hash((self.plan.seed, self.plan.layer, self.turns)) % 2**31,
        )

    def _token_positions(self) -> Tensor:
        """Positions `[B, H, T]` with −1 at padding, whether or not it is still stored."""
        assert self.store is not None
        positions = self.store.positions
        if self.valid is None:
            return positions
        real = self.valid[:, None].expand(-1, positions.shape[1], -1)
        return positions.masked_fill(~real.gather(2, positions.clamp(min=0)), -1)

    def _seen_per_row(self) -> Tensor:
        """Tokens seen by each row `[B]`, padding left out."""
        assert self.store is not None
        if self.valid is None:
            return torch.full((len(self.store.keys),), self.seen, device=self.store.keys.device)
        return self.valid.sum(-1)

    def _compress(self, seen: Observation) -> None:
        """Ends a turn: brings the layer back to its budget."""
        self.turns += 1
        if self.plan.stages.score is None:
            return
        assert self.store is not None
        counts = self.plan.counts(self._seen_per_row(), self.store)
        everything = self.plan.budget == Budget.ratio(1.0)
        self.capacity = None if everything else counts
        self._evict(seen, counts)

    def _hold(self, attended: Attended) -> None:
        """After a generated token: back to the size of the last turn's end."""
        assert self.store is not None and self.plan.budget is not None
        if self.capacity is None and self.turns == 0 and self.plan.budget.kind != "ratio":
            self.capacity = self.plan.counts(self._seen_per_row(), self.store)
        if self.capacity is not None:
            self.turns += 1
            self._evict(self._observation(attended), self.capacity)

    def _evict(self, seen: Observation, counts: Tensor) -> None:
        """Keeps the `counts[B]` best entries of each row, and whatever is forced to stay."""
        assert self.store is not None and self.plan.stages.score is not None
        positions = self._token_positions()
        stored = (positions >= 0).sum(-1).amax(-1)
        if bool((counts >= stored).all()):
            return
        scores = self._per_stored_head(self.plan.stages.score(seen))
        padding = self.seen - self._seen_per_row()
        forced = self.plan.stages.forced.mask(positions, padding, counts)
        needed = forced.sum(-1).amax(-1)
        self.over_budget = bool((needed > counts).any())
        counts = torch.minimum(torch.maximum(counts, needed), stored)
        slots = top(with_forced(scores, forced, positions), counts)
        self._restore_sinks()
        self.store.keep(slots)
        if self.sums is not None:
            self.sums = self.sums.gather(2, slots.clamp(min=0)).masked_fill(slots < 0, 0.0)
        if self.plan.stages.positions == "reindex":
            self.sink_keys = self.store.keys.gather(2, self._sink_slots()).clone()

    # --- sinks that move (StreamingLLM) -----------------------------------------------------

    def _sink_slots(self) -> Tensor:
        """Slots of the sinks `[B, H, sinks, D]`: the first ones after a row's holes."""
        assert self.store is not None
        positions = self.store.positions
        holes = (positions < 0).sum(-1, keepdim=True)
        count = min(self.plan.stages.forced.sinks, positions.shape[-1])
        slots = holes + torch.arange(count, device=holes.device)
        slots = slots.clamp(max=positions.shape[-1] - 1)
        return slots[..., None].expand(*slots.shape, self.store.keys.shape[-1])

    def _restore_sinks(self) -> None:
        if self.sink_keys is not None:
            assert self.store is not None
            self.store.keys.scatter_(2, self._sink_slots(), self.sink_keys)

    def _move_sinks(self) -> None:
        """Rotates the sinks, from their stored originals, up to the oldest recent token."""
        assert self.store is not None and self.sink_keys is not None
        stored = (self.store.positions >= 0).sum(-1)[:, 0]
        shift = self._seen_per_row_after_update() - stored
        moved = self.rotation(self.sink_keys, shift)
        self.store.keys.scatter_(2, self._sink_slots(), moved)

    def _seen_per_row_after_update(self) -> Tensor:
        """As `_seen_per_row`, before the forward's mask has been seen: new columns are tokens."""
        assert self.store is not None
        if self.valid is None:
            return self._seen_per_row()
        return self.valid.sum(-1) + self.seen - self.valid.shape[-1]
