# SPDX-License-Identifier: Apache-2.0
"""One layer of the cache: stores what the model writes, and is compressed by its method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.budget import Budget
from kvfold.compat import CacheLayerMixin, Rotation
from kvfold.compensate.eviction import Eviction, Leaving
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.logical import Logical
from kvfold.method import Across, Measured
from kvfold.observation import Observation
from kvfold.owner import Owner
from kvfold.recall import Attended, LastQueries
from kvfold.select.choose import choose, leaving
from kvfold.select.forced import with_forced
from kvfold.store.dense import DenseStore
from kvfold.store.encoded import Encode, EntrySize
from kvfold.store.segments import SegmentStore
from kvfold.store.sinks import MovingSinks
from kvfold.turn import Plan, Turn

# What a layer keeps about its entries [B, H, T], in their order.
PER_ENTRY = ("sums", "squares", "rebuilding")


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
        self.store: DenseStore | SegmentStore | None = None
        self.is_initialized = False
        self.logical = Logical()
        self.turns = 0
        self.evicted_at = 0  # tokens seen when something was last evicted or encoded
        self.sums: Tensor | None = None  # [B, H, T], attention received so far
        self.squares: Tensor | None = None  # [B, H, T], the same, squared
        self.rebuilding: Tensor | None = None  # [B, H, T], most attention while repeating the text
        self.capacity: Tensor | None = None  # [B], entries to hold while decoding
        self.merging: Tensor | None = None  # [B, H], what the compensation remembers
        self.surplus: int | None = None  # entries above capacity; None: not as many in all heads
        self.error: Tensor | None = None  # [B, 1 or 2], of its output: predicted, measured
        self.late = False  # compresses at the first generated token
        self.over_budget = False  # the forced set was larger than the budget
        self.last_queries = LastQueries(self.plan.stages.needs.window)
        self.sinks: MovingSinks | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.store = DenseStore(key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores new entries `[B, H, S, D]`; returns what is stored as it came."""
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        else:
            if key_states.shape[2] > 1 and not self.turn.frozen:
                self._leave_out_dead()
            self.store.append(key_states, value_states, first=self.seen)
        new = key_states.shape[2]
        self.logical.seen += new
        self.surplus = None if self.surplus is None else self.surplus + new
        store = self.stored()
        self.settle_sinks()
        return store.keys, store.values

    @property
    def seen(self) -> int:
        """Columns of the logical sequence."""
        return self.logical.seen

    def stored(self) -> DenseStore | SegmentStore:
        """The store of a layer that has been written to."""
        assert self.store is not None
        return self.store

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
        self.logical.crop(count)
        self.surplus = None if self.surplus is None else self.surplus - count
        self._per_entry(lambda x: x[..., : self.stored().length].clone())
        self.settle_sinks()

    def settle_sinks(self) -> None:
        """Moves re-indexed sinks to where all that is stored puts them."""
        if self.sinks is not None and isinstance(self.store, DenseStore):
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
        self.logical.index(rows)
        self.last_queries.index(rows)
        self._per_entry(rows)
        for name in ("capacity", "merging", "error"):
            if getattr(self, name) is not None:
                setattr(self, name, rows(getattr(self, name)))
        if self.sinks is not None:
            self.sinks.index(rows)

    def _per_entry(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in PER_ENTRY:
            if getattr(self, name) is not None:
                setattr(self, name, change(getattr(self, name)))

    # --- what the attention function asks ---------------------------------------------------

    @property
    def sums_wanted(self) -> bool:
        """Whether this forward's column sums will be used."""
        return self.plan.stages.needs.column_sums and not self.turn.frozen

    def evicts_one(self, new: int) -> bool:
        """Whether one entry of each head leaves after this forward of `new` tokens."""
        stages, turn, valid = self.plan.stages, self.turn, self.logical.valid
        if new > 1 or self.surplus != 1 or stages.decode != "hold":
            return False
        if turn.frozen or turn.driving or turn.ends(self.seen, new) or turn.goes_on(self.seen):
            return False
        cheaply = stages.compensate_one is not None and self.sinks is None and not self.plan.shared
        if stages.compensate is not None and not cheaply:
            return False
        return valid is None or bool(valid[:, -1].all())

    def counted(self, new: int) -> Tensor | None:
        """Which of the last `new` queries are tokens `[B, S]`; None: all are."""
        return None if self.logical.valid is None else self.logical.valid[:, -new:]

    def finish(self, attended: Attended) -> None:
        """Called when the layer's attention is done: observes, and compresses when it is time."""
        if attended.maxima is not None:
            self._add_maxima(attended.maxima)
        if self.turn.driving:
            columns = torch.arange(self.seen, device=attended.query.device)
            self.turn.watched = self._observe(attended, columns.repeat(len(attended.query), 1))
            return
        if self.turn.frozen:
            return
        if attended.sums is not None:
            self._add_moments(attended)
        stages = self.plan.stages
        if self.turn.ends(self.seen, attended.query.shape[2]):
            self._end_turn(self._observation(attended))
        elif self.turn.goes_on(self.seen):
            self.last_queries.add(attended, self.logical)
        elif stages.decode == "hold" and stages.score is not None:
            self._hold(attended)
        elif self.late:
            self.late = False
            self._size_and_compress(self._observation(attended))
        elif isinstance(self.store, SegmentStore) and stages.encode is not None:
            self.turn.encode(self, decoding=True)

    def adopt(self, columns: Tensor, valid: Tensor) -> None:
        """Takes what was just stored for `columns [B, T]` of a prompt in which `valid [B, N]`."""
        store = self.stored()
        assert isinstance(store, DenseStore)
        self.logical = Logical(valid.shape[1], None if bool(valid.all()) else valid)
        self.turns += 1
        if columns.shape[1] < valid.shape[1]:
            store.place(columns)
            self.evicted_at = self.seen

    def end_turn(self) -> None:
        """Compresses after a `reading()` block, from what was remembered of it."""
        attended = self.last_queries.attended
        if attended is None or self.store is None:
            return
        if attended.key.shape[1] != self.store.keys.shape[1]:
            raise UnsupportedModel(
                "this model's cache holds latents, whose keys exist only inside a forward: name "
                "the turn's length, `with cache.reading(until=tokens):`, so that its last forward "
                "can compress"
            )
        self._end_turn(self._observe(attended, self.last_queries.columns))

    def state_bytes(self) -> int:
        """Bytes of all tensors beside the store."""
        tensors = [getattr(self, name) for name in (*PER_ENTRY, "capacity", "merging", "error")]
        tensors.append(self.logical.valid)
        if self.sinks is not None:
            tensors.append(self.sinks.given)
        held = sum(t.numel() * t.element_size() for t in tensors if t is not None)
        return held + self.last_queries.nbytes()

    # --- observe ----------------------------------------------------------------------------

    def _add_moments(self, attended: Attended) -> None:
        for name in ("sums", "squares"):
            new, old = getattr(attended, name), getattr(self, name)
            if new is not None:
                new = self._per_stored_head(new)
                if old is not None:
                    new[..., : old.shape[-1]].add_(old)
                setattr(self, name, new)

    def _add_maxima(self, maxima: Tensor) -> None:
        """Of the text's entries only: what repeats it is taken back."""
        assert self.turn.repeating is not None
        maxima = self._per_stored_head(maxima)[..., : self.turn.repeating.text]
        old = self.rebuilding
        self.rebuilding = maxima.clone() if old is None else torch.maximum(old, maxima)

    def _per_stored_head(self, scores: Tensor) -> Tensor:
        """Mean over the attention heads that one stored head serves (several for latents)."""
        if scores.shape[1] == self.stored().keys.shape[1]:
            return scores
        return scores.unflatten(1, (self.stored().keys.shape[1], -1)).mean(2)

    def _observation(self, attended: Attended) -> Observation:
        if attended.row is not None and self.plan.stages.needs.window <= 1:
            return self._observe(attended, None)
        query, columns = self.last_queries.joined(attended, self.logical)
        return self._observe(dataclasses.replace(attended, query=query), columns)

    def _observe(self, attended: Attended, query_columns: Tensor | None) -> Observation:
        store = self.stored()
        latents = attended.key.shape[1] // store.keys.shape[1]
        keys, values = (attended.key, attended.value) if latents > 1 else store.dense()

        def per_head(entries: Tensor | None) -> Tensor | None:
            if entries is None or latents == 1:
                return entries
            return entries.repeat_interleave(latents, 1)

        places = self.places()
        return Observation(
            keys,
            values,
            places if latents == 1 else places.repeat_interleave(latents, 1),
            attended.query,
            None if query_columns is None else self.logical.places(query_columns),
            attended.row,
            column_sums=per_head(self.sums),
            column_squares=per_head(self.squares),
            rebuilding=per_head(self.rebuilding),
            seen=self.seen_per_row(),
            layer=self.plan.layer,
            layers=self.plan.layers,
            scale=attended.scale,
            softcap=attended.softcap,
            sinks=attended.sinks,
            seed=hash((self.plan.seed, self.plan.layer, self.turns)) % 2**31,
        )

    def columns(self) -> Tensor:
        """Logical columns of the stored entries `[B, H, T]`, −1 for padding."""
        return self.logical.real(self.stored().positions)

    def places(self) -> Tensor:
        """Each stored entry's number among its row's tokens `[B, H, T]`, −1 for padding."""
        return self.logical.places(self.columns())

    def seen_per_row(self) -> Tensor:
        """Tokens seen by each row `[B]`, padding left out."""
        keys = self.stored().keys
        return self.logical.per_row(len(keys), keys.device)

    def _evicted_per_row(self) -> Tensor:
        """Tokens seen but not stored `[B]`, where all heads store the same."""
        return self.seen_per_row() - (self.columns()[:, 0] >= 0).sum(-1)

    # --- allocate, select, compensate, store ------------------------------------------------

    def _end_turn(self, seen: Observation) -> None:
        """Ends a turn: brings the layer back to its budget."""
        stages = self.plan.stages
        self.turns += 1
        self.last_queries.forget()
        own_forwards = stages.funnel or (stages.needs.rebuilding and self.rebuilding is None)
        if own_forwards:
            self._check_started()
            if stages.encode is not None:
                self._encode_all(seen)
        elif stages.decode == "once":
            self.late = True
        elif isinstance(stages.allocate, Across):
            self.turn.gather(self, self._with_candidates(seen))
        elif stages.score is not None or stages.encode is not None:
            self._size_and_compress(seen)

    def _with_candidates(self, seen: Observation) -> Observation:
        """Rebuilding scores in which what is kept anyway wins, and the prefix takes no part."""
        if seen.rebuilding is None:
            return seen
        places = self.places()
        forced = self.plan.stages.forced.mask(places, torch.zeros_like(self.seen_per_row()))
        scores = with_forced(seen.rebuilding, forced, places)
        prefix = places < self.protected().view(-1, 1, 1)
        return dataclasses.replace(seen, rebuilding=scores.masked_fill(prefix, -torch.inf))

    def _check_started(self) -> None:
        """Raises KvfoldError for a first turn without the method's own; later ones come on top."""
        if self.turns == 1:
            raise KvfoldError(
                "this method runs forwards of its own over a first prompt: use kvfold.compress or "
                "kvfold.generate, with a cache that was given tokenizer= where it needs one"
            )

    def _size_and_compress(self, seen: Observation) -> None:
        if self.plan.stages.score is None:
            self._encode_all(seen)
        else:
            self.compress(seen, self._share(seen))

    def _share(self, seen: Observation) -> Tensor:
        """Entries per KV head, `[B]` or `[B, H]`; evenly where other layers are not known yet."""
        if isinstance(self.plan.stages.allocate, Across):
            return self.per_head()
        free, heads = self.seen_per_row() - self.protected(), self.stored().keys.shape[1]
        return self.plan.counts(seen, free, self._entry_size(), heads)

    def per_head(self) -> Tensor:
        """The budget in entries per KV head and layer `[B]`, beside protected ones."""
        free = self.seen_per_row() - self.protected()
        size, heads = self._entry_size(), self.stored().keys.shape[1]
        totals = [self.plan.total(n, size, heads, len(free)) for n in free.tolist()]
        return torch.tensor(totals, device=free.device) // self.plan.layers

    def _entry_size(self) -> EntrySize:
        keys, values = self.stored().keys, self.stored().values
        return EntrySize(keys.shape[-1], values.shape[-1], keys.element_size())

    def protected(self) -> Tensor:
        """First tokens of each row that are kept beside the budget `[B]`."""
        if self.turn.prefix is None:
            return torch.zeros_like(self.seen_per_row())
        return self.turn.prefix

    def compress(self, seen: Observation, counts: Tensor) -> None:
        """Brings the layer to `counts`, `[B]` or `[B, H]`, entries per KV head."""
        everything = self.plan.budget == Budget.ratio(1.0)
        counts = counts + self.protected().view(-1, *[1] * (counts.dim() - 1))
        self.capacity = None if everything or counts.dim() > 1 else counts
        self._evict(seen, counts)
        self.rebuilding = None

    def _hold(self, attended: Attended) -> None:
        """After a generated token: back to the size of the last turn's end."""
        assert self.plan.budget is not None
        if self.capacity is None and self.turns == 0 and self.plan.budget.kind != "ratio":
            self.capacity = self._share(self._observation(attended))
        if self.capacity is not None:
            self.turns += 1
            seen = self._observation(attended)
            if attended.row is not None:
                self._drop_one(seen, self.capacity)
            else:
                self._evict(seen, self.capacity)

    def _drop_one(self, seen: Observation, capacity: Tensor) -> None:
        """One entry of each head leaves, and what stays is not moved."""
        stages, places, store = self.plan.stages, self.places(), self.stored()
        assert isinstance(store, DenseStore)
        protected = None
        if self.turn.prefix is not None:
            protected = places < self.turn.prefix.view(-1, 1, 1)
        slot = leaving(stages, seen, places, protected, capacity)
        if stages.compensate_one is not None:
            change = stages.compensate_one(
                Leaving(store.keys, store.values, places, slot, self.merging)
            )
            store.change(change.slot, change.keys, change.values)
            self.merging = change.state
        store.drop(slot)
        self.surplus, self.evicted_at = 0, self.seen
        if store.crowded:
            self._leave_out_dead()

    def _leave_out_dead(self) -> None:
        """Copies what is alive, where entries have left without being moved."""
        if isinstance(self.store, DenseStore) and self.store.dead:
            self._store_only(self.store, _alive(self.store.positions))

    def _evict(self, seen: Observation, counts: Tensor) -> None:
        """Keeps the `counts`, `[B]` or `[B, H]`, best entries, and whatever is forced to stay."""
        stages, places = self.plan.stages, self.places()
        if counts.dim() > 1:
            self._check_heads(seen)
        stored = (places >= 0).sum(-1)
        if bool((counts.view(len(counts), -1) >= stored).all()):
            slots = torch.arange(places.shape[-1], device=places.device)
            self._note_error(seen, slots.expand_as(places))
            self._note_surplus(stored, counts)
            if stages.encode is not None:
                self._encode_all(seen)
            return
        forced = places < self.protected().view(-1, 1, 1)
        if isinstance(self.store, SegmentStore) and not self.store.encode.evictable:
            forced = forced | self.store.encoded
        chosen = choose(stages, seen, places, forced & (places >= 0), counts)
        self.over_budget = chosen.over_budget
        self._note_error(seen, chosen.slots)
        self._note_surplus((chosen.slots >= 0).sum(-1), counts)
        self._keep(seen, chosen.slots, ragged=stages.heads is not None or counts.dim() > 1)

    def _note_surplus(self, kept: Tensor, counts: Tensor) -> None:
        """Whether every head holds exactly its capacity now."""
        held = self.capacity is not None and bool((kept == counts.view(len(counts), -1)).all())
        self.surplus = 0 if held else None

    def _note_error(self, seen: Observation, slots: Tensor) -> None:
        """What a method without a budget says of its choice."""
        allocate = self.plan.stages.allocate
        if isinstance(allocate, Measured) and allocate.error is not None:
            length = seen.positions.shape[-1]
            # Holes write into one more column, which is cut off.
            kept = F.pad(torch.zeros_like(seen.positions, dtype=torch.bool), (0, 1))
            kept = kept.scatter(2, slots.masked_fill(slots < 0, length), True)[..., :length]
            self.error = allocate.error(seen, kept)

    def _encode_all(self, seen: Observation) -> None:
        """Evicts nothing but padding, and encodes."""
        self._keep(seen, _alive(self.places()), ragged=True)

    def _keep(self, seen: Observation, slots: Tensor, ragged: bool) -> None:
        """Keeps the entries at `slots [B, H, K]`, compensated for the others, encoded."""
        stages, store = self.plan.stages, self.stored()
        saved = None
        if stages.compensate is not None:
            if self.sinks is not None and isinstance(store, DenseStore):
                self.sinks.restore(store)
            keys, values = store.dense()
            eviction = Eviction(
                keys, values, self.places(), slots, self.sums, self.merging, seen.seed
            )
            *saved, self.merging = stages.compensate(eviction)
        if ragged or stages.encode is not None:
            self._keep_in_segments(seen, slots, saved)
        else:
            assert isinstance(store, DenseStore)
            self._store_only(store, slots)
            if saved is not None:
                store.replace(*saved)
        self.evicted_at = self.seen

    def _store_only(self, store: DenseStore, slots: Tensor) -> None:
        """Keeps the entries at `slots [B, H, K]` of a dense store."""
        if self.sinks is not None:
            self.sinks.restore(store)
        store.keep(slots)
        self._select_per_entry(slots)
        if self.plan.stages.positions == "reindex":
            self.sinks = MovingSinks(store, self.plan.stages.forced.sinks, self.rotation)

    def _select_per_entry(self, slots: Tensor) -> None:
        self._per_entry(lambda x: x.gather(2, slots.clamp(min=0)).masked_fill(slots < 0, 0.0))

    def _keep_in_segments(
        self, seen: Observation, slots: Tensor, saved: list[Tensor] | None
    ) -> None:
        encode, store = self.plan.stages.encode or Encode(), self.stored()
        self._check_heads(seen)
        if isinstance(store, SegmentStore) and not encode.evictable:
            store.keep(slots)
        else:
            positions = None if self._is_everything(slots) else store.positions
            self.store = SegmentStore(*store.dense(), positions, slots, encode)
            if saved is not None:
                self.store.replace(*saved)
        # Entries stored as they came need no second look at them, which is a copy.
        observed = seen.at(slots) if self.plan.stages.encode is not None else None
        self.turn.encode(self, decoding=False, seen=observed)
        self._select_per_entry(slots)

    def _check_heads(self, seen: Observation) -> None:
        """Raises UnsupportedModel where heads have no entries of their own."""
        if seen.keys.shape[1] != self.stored().keys.shape[1]:
            raise UnsupportedModel(
                "this model's cache holds latents, one for all heads: budgets per head, packed, "
                "pruned and paired entries need keys of each head"
            )

    def _is_everything(self, slots: Tensor) -> bool:
        """Whether entry i is column i, before and after."""
        store = self.stored()
        untouched = isinstance(store, DenseStore) and store.stored_positions is None
        return untouched and slots.shape[-1] == store.length and bool((slots >= 0).all())


def _alive(places: Tensor) -> Tensor:
    """Slots `[B, H, K]` of the entries whose place is not −1, ascending; holes on the left."""
    slots = torch.arange(places.shape[-1], device=places.device).expand_as(places)
    slots = slots.masked_fill(places < 0, -1).sort(-1).values
    return slots[..., int((slots < 0).sum(-1).min()) :]
