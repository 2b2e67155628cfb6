# SPDX-License-Identifier: Apache-2.0
"""How a layer is compressed: sizes, selection, compensation, and stores of what stays."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.budget import Budget
from kvfold.cache.state import Held
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.kernels.gather import pick
from kvfold.methods.base import Across, Measured
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import UNLIMITED
from kvfold.methods.stages.merge.base import Eviction
from kvfold.methods.stages.select.choose import choose, scores_of
from kvfold.methods.stages.select.forced import with_forced
from kvfold.methods.stages.select.top import top
from kvfold.store.dense import DenseStore
from kvfold.store.encoding import Encode, EntrySize
from kvfold.store.ragged import SegmentStore


class Compression(Held):
    """A layer that brings itself back to its budget."""

    def _end_turn(self, seen: Observation) -> None:
        """Ends a turn: brings the layer back to its budget."""
        stages = self.plan.stages
        self.turns += 1
        self.last_queries.forget()
        if self.turn.own is not None:
            self._keep_own(seen, self.turn.own)
            return
        own_forwards = stages.funnel or (stages.needs.rebuilding and self.rebuilding is None)
        if own_forwards:
            self._check_started()
            if stages.encode is not None:
                self._encode_all(seen)
            return
        if stages.decode == "once":
            self.late = True
            return
        self.settled = self.seen
        if isinstance(stages.allocate, Across):
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

    def _keep_own(self, seen: Observation, most: int) -> None:
        """Brings what a reader has read itself to the `most` best; what it shares stays."""
        store, stages = self.stored(), self.plan.stages
        own = store.own
        if own <= most:
            return
        places = self.places()
        counts = torch.full((len(places),), most, device=places.device)
        scores = scores_of(stages, dataclasses.replace(seen, budget=counts), places.shape[1])
        scores = with_forced(scores, stages.forced.mask(places, counts), places)
        slots = top(scores[..., -own:], counts)
        store.keep_own(slots)
        self._per_entry(lambda x: torch.cat([x[..., :-own], pick(x[..., -own:], slots, 0)], -1))
        self.evicted_at = self.seen

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
        free = self.seen_per_row() - self.protected()
        return self.plan.counts(seen, free, self._entry_size(), self._heads())

    def per_head(self, unrounded: bool = False) -> Tensor:
        """The budget in entries per KV head and layer `[B]`, beside protected ones.

        Whole entries, int64; `unrounded` float64.
        """
        free = self.seen_per_row() - self.protected()
        size, heads = self._entry_size(), self._heads()
        if unrounded:
            exact = [self.plan.unrounded(n, size, heads, len(free)) for n in free.tolist()]
            return torch.tensor(exact, device=free.device, dtype=torch.float64)
        totals = [self.plan.total(n, size, heads, len(free)) for n in free.tolist()]
        return torch.tensor(totals, device=free.device) // self.plan.layers

    def _heads(self) -> int:
        """The layer's KV heads, on all ranks together."""
        return self.stored().keys.shape[1] * self.plan.ranks.size

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
        everything = self.plan.budget == Budget.ratio(1.0) or bool((counts == UNLIMITED).all())
        counts = counts + self.protected().view(-1, *[1] * (counts.dim() - 1))
        self.capacity = None if everything or counts.dim() > 1 else counts
        self._evict(seen, counts)
        self.rebuilding = None
        self.settled = self.seen

    def _evict(self, seen: Observation, counts: Tensor) -> None:
        """Keeps the `counts`, `[B]` or `[B, H]`, best entries, and whatever is forced to stay."""
        stages, places = self.plan.stages, self.places()
        if counts.dim() > 1:
            self._check_heads(seen)
        stored = (places >= 0).sum(-1)
        if self.plan.ranks.all((counts.view(len(counts), -1) >= stored).all()):
            slots = torch.arange(places.shape[-1], device=places.device)
            self._note_error(seen, slots.expand_as(places))
            self._note_surplus(stored, counts)
            self._mark_padding()
            if stages.encode is not None:
                self._encode_all(seen)
            # What is recent may reach further back from now on, and be counted in slots.
            self._leave_out_dead()
            return
        forced = places < self.protected().view(-1, 1, 1)
        if isinstance(self.store, SegmentStore) and not self.store.encode.as_they_came:
            forced = forced | self.store.encoded
        chosen = choose(stages, seen, places, forced & (places >= 0), counts)
        self.over_budget = chosen.over_budget
        self._note_error(seen, chosen.slots)
        self._note_surplus((chosen.slots >= 0).sum(-1), counts)
        self._keep(seen, chosen.slots, ragged=stages.heads is not None or counts.dim() > 1)

    def _mark_padding(self) -> None:
        """Makes holes of padding where single entries are to leave: these never join it."""
        padded = self.logical.valid is not None and self.surplus == 0
        if padded and isinstance(self.store, DenseStore):
            self.store.place(self.columns())

    def _leave_out_dead(self) -> None:
        """Copies what is alive, where entries have left without being moved."""
        if isinstance(self.store, DenseStore) and self.store.dead:
            self.copy_alive()

    def copy_alive(self) -> None:
        """Copies what is alive: nobody else looks at what is stored then."""
        store = self.stored()
        assert isinstance(store, DenseStore)
        self._store_only(store, alive(store.positions))

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
        self._keep(seen, alive(self.places()), ragged=True)

    def _keep(self, seen: Observation, slots: Tensor, ragged: bool) -> None:
        """Keeps the entries at `slots [B, H, K]`, compensated for the others, encoded."""
        stages, store = self.plan.stages, self.stored()
        saved = None
        self.return_sinks()
        if stages.compensate is not None:
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
        self.note_eviction()

    def _store_only(self, store: DenseStore, slots: Tensor) -> None:
        """Keeps the entries at `slots [B, H, K]` of a dense store."""
        store.keep(slots)
        self._select_per_entry(slots)

    def _select_per_entry(self, slots: Tensor) -> None:
        self._per_entry(lambda x: pick(x, slots, 0))

    def _keep_in_segments(
        self, seen: Observation, slots: Tensor, saved: list[Tensor] | None
    ) -> None:
        encode, store = self.plan.stages.encode or Encode(), self.stored()
        self._check_heads(seen)
        if isinstance(store, SegmentStore) and not encode.as_they_came:
            store.keep(slots)
        else:
            positions = None if self._is_everything(slots) else store.positions
            entries, taken = store.dense(), slots
            if saved is not None:
                # Changed on the way: one for each of the slots, and taken from there.
                entries = saved[0], saved[1]
                positions = store.positions.gather(2, slots.clamp(min=0))
                places = torch.arange(slots.shape[-1], device=slots.device)
                taken = places.expand_as(slots).masked_fill(slots < 0, -1)
            self.store = SegmentStore(*entries, positions, taken, encode)
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
        whole = untouched and slots.shape[-1] == store.length
        return self.plan.ranks.all((slots >= 0).all() & whole)


def alive(places: Tensor) -> Tensor:
    """Slots `[B, H, K]` of the entries whose place is not −1, ascending; holes on the left."""
    slots = torch.arange(places.shape[-1], device=places.device).expand_as(places)
    slots = slots.masked_fill(places < 0, -1).sort(-1).values
    return slots[..., int((slots < 0).sum(-1).min()) :]
