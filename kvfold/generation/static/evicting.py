# SPDX-License-Identifier: Apache-2.0
"""A dense layer that evicts one entry per head at every step of a compiled graph."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.cache.layer import CompressedLayer
from kvfold.generation.static.layer import StaticBuffers
from kvfold.kernels.gather import alive, as_added, pick, take
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.single_query import attend_with_row, mean_of_heads
from kvfold.methods.observation import Observation
from kvfold.methods.stages.merge.base import Leaving
from kvfold.methods.stages.select.choose import leaving_beside, staying
from kvfold.observers.column_sums import ColumnSquares, ColumnSums
from kvfold.store.buffer import slack
from kvfold.store.dense import DenseStore


class StaticEvicting(StaticBuffers):
    """Static buffers whose evicted entries keep their slot, as holes, until room is needed.

    `positions [B, H, T]` number each row's tokens, −1 where nothing is; `tokens [B]` are those of
    each row, `running [B]` is false where it has ended, `capacity [B]` what it holds, None where
    nothing ever leaves. `ends [2]` are how many of the first and of the last entries stay, None
    where that differs. `merging` is that of the layer, `numbers` are its observers'.
    """

    def __init__(self, layer: CompressedLayer, room: int) -> None:
        state = layer.state
        state.copy_alive()  # since entries will be moved where they are
        store = state.stored()
        missing, enough = 0, room
        if state.capacity is not None:
            most = state.capacities()[1]
            missing = max(0, most - store.keys.shape[2])
            enough = missing + slack(most)
        super().__init__(layer, min(room, enough))
        self.left = self.keys.shape[2] - self.first
        self.plan, self.capacity, self.prefix = state.plan, state.capacity, state.phase.prefix
        if self.capacity is not None and (not missing or room >= enough):
            self.room = math.inf  # some have left when it is used up: moves the others together
        merge = state.plan.stages.merge
        self.merge_one = None if merge is None else merge.one
        self.tokens, self.phase = state.seen_per_row().clone(), state.phase
        self.running = torch.ones_like(self.tokens, dtype=torch.bool)
        ends = state.forced_ends()
        self.ends = None if ends is None else torch.tensor(ends, device=self.used.device)
        self.positions = self._widened(state.positions().int(), -1)
        self.empties, self.numbers = state.observers.empties, dict[str, Tensor]()
        for name, (numbers, empty) in state.observers.numbers().items():
            self.numbers[name] = self._widened(numbers, empty)
            state.observers.set_numbers(name, None)  # until they are handed back
        self.sums, self.squares = self.numbers.get("sums"), self.numbers.get("squares")
        sums = {ColumnSums: self.sums, ColumnSquares: self.squares}
        self._observed = {kind: held for kind, held in sums.items() if held is not None}
        self.merging = state.merging
        if self.merge_one is not None:
            # NaN stands for a head of which nothing has left yet.
            nothing = torch.full(
                self.positions.shape[:2],
                torch.nan,
                dtype=torch.float32,
                device=self.positions.device,
            )
            self.merging = nothing if self.merging is None else self.merging.clone()
        self.bias = self._widened_bias(layer)
        for per_entry in (self.positions, self.sums, self.squares):
            if per_entry is not None:
                torch._dynamo.maybe_mark_dynamic(per_entry, 2)
        self._keep_in_place()

    def _take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes one entry per head `[B, H, 1, D]` into the next slot."""
        heads = self.positions.shape[1]
        newest = self.tokens.where(self.running, -1).to(self.positions.dtype)
        newest = newest.view(-1, 1, 1).expand(-1, heads, -1)
        self.positions.index_copy_(2, self.used.view(1), newest)
        self.tokens.add_(self.running)
        return super()._take(keys, values)

    def _attend(self, query: Tensor, options: LogitOptions) -> Tensor:
        added = self._hidden() if self.bias is None else self._hidden() + self.bias
        hidden = added.flatten(0, 1)[:, None]
        out, row = attend_with_row(query, self.keys, self.values, hidden, **options)
        if self.sums is not None:
            received = mean_of_heads(row, self.positions.shape[1]) * self.running.view(-1, 1, 1)
            self.sums.add_(received)
            if self.squares is not None:
                self.squares.add_(received.square())
        if self.capacity is not None:
            seen = Observation(
                self.keys,
                self.values,
                self.positions,
                query,
                attention=row,
                observed=self._observed,
                tokens_seen=self.tokens,
                budget=self.capacity,
                layer=self.plan.layer,
                layers=self.plan.layers,
                **options,
            )
            self._drop_one(seen, self.capacity)
        return out.transpose(1, 2)

    def _drop_one(self, seen: Observation, capacity: Tensor) -> None:
        """Evicts one entry of each head that holds more than its capacity."""
        slots = torch.arange(self.positions.shape[2], device=capacity.device)
        if self.ends is None:
            protected = None if self.prefix is None else self.positions < self.prefix.view(-1, 1, 1)
            stay = staying(self.plan.stages, self.positions, protected, capacity)
        else:
            forced = (slots < self.ends[0]) | (slots >= self.used - self.ends[1])
            stay = forced | (self.positions < 0)
        slot = leaving_beside(self.plan.stages, seen, stay)
        full = (self.positions >= 0).sum(-1, keepdim=True) > capacity.view(-1, 1, 1)
        full = full & ~stay.all(-1, keepdim=True)  # a head of forced entries only keeps them
        self.positions.masked_fill_((slots == slot) & full, -1)
        if self.merge_one is not None:
            # A head of capacity 0 keeps no entry to merge into.
            self._merge(slot, full & (capacity > 0).view(-1, 1, 1))

    def _merge(self, slot: Tensor, full: Tensor) -> None:
        """Merges the entry evicted at `slot` into a kept one, in each `full [B, H, 1]` head."""
        assert self.merge_one is not None
        leaving = Leaving(self.keys, self.values, self._hidden(), slot, self.merging)
        (change,) = self.merge_one([leaving])
        batch, heads = slot.shape[:2]
        rows = torch.arange(batch, device=slot.device).view(-1, 1, 1)
        place = rows, torch.arange(heads, device=slot.device).view(-1, 1), change.slot
        keys = change.keys.where(full[..., None], self.keys[place])
        values = change.values.where(full[..., None], self.values[place])
        self.keys.index_put_(place, keys)
        self.values.index_put_(place, values)
        if self.merging is not None and change.state is not None:
            self.merging.copy_(change.state.where(full.squeeze(-1), self.merging))

    def _hidden(self) -> Tensor:
        """Additive mask `[B, H, T]`: −∞ at empty slots and holes, 0 elsewhere."""
        return as_added(self.positions < 0, self.keys.dtype)

    def _widened(self, per_entry: Tensor, empty: float) -> Tensor:
        """Numbers `[B, H, …]` per entry, padded with `empty` to the buffers' length."""
        room = self.keys.shape[2] - per_entry.shape[2]
        return F.pad(per_entry, (0, room), value=empty)

    def between_steps(self) -> None:
        """Notes which rows go on, and moves kept entries together when the room is used up."""
        if self.phase.ended is not None:
            self.running.copy_(~self.phase.ended[:, -1])
        self.left -= 1
        if self.left > 0 or self.capacity is None:
            return
        used = int(self.used)
        slots = alive(self.positions[:, :, :used])
        kept = slots.shape[2]
        for entries in (self.keys, self.values):
            entries[:, :, :kept] = take(entries, slots)
        numbers = [(of_entries, self.empties[name]) for name, of_entries in self.numbers.items()]
        beside = [(self.positions, -1), (self.bias, 0), *numbers]
        for per_entry, empty in beside:
            if per_entry is not None:
                per_entry[:, :, :kept] = pick(per_entry, slots, empty)
                per_entry[:, :, kept:] = empty
        self.used.sub_(used - kept)
        self.evicted.add_(used - kept)
        self.left = used - kept

    def hand_back(self, layer: CompressedLayer) -> None:
        state = layer.state
        slots = alive(self.positions[:, :, : int(self.used)])
        new = int(self.used + self.evicted) - state.seen
        state.sequence.grow(new)
        state.sequence.note_mask(state.sequence.tokens())
        layer.leave_out_ended()
        store = DenseStore(take(self.keys, slots), take(self.values, slots))
        positions = pick(self.positions, slots, -1)
        columns = state.sequence.columns(positions.long())
        # Entries at the first columns are moved too if others have left: what follows is not there.
        if store.length < state.seen or not torch.equal(columns, store.columns):
            store.place(columns)
        if self.bias is not None:
            store.set_bias(pick(self.bias, slots, 0))
        state.put(store)
        merged = self.merging is not None and not bool(self.merging.isnan().all())
        state.note_merging(self.merging if merged else None)
        for name, numbers in self.numbers.items():
            state.observers.set_numbers(name, pick(numbers, slots, self.empties[name]))
        if self.capacity is None or not new:
            return
        state.begin_eviction(new)
        held = (positions >= 0).sum(-1) == self.capacity.view(-1, 1)
        state.note_surplus(bool(held.all()))
        evicted = bool(((positions >= 0).sum(-1) < self.tokens.view(-1, 1)).any())
        if evicted:
            state.note_eviction()
        elif self.sums is not None:
            state.stay()
