# SPDX-License-Identifier: Apache-2.0
"""Renumbering: entries of an edited sequence get new columns, and their keys new positions.

RoPE is relative: a key at position p that is rotated by s more positions is the key that its token
would have at p + s, had it attended to the same entries.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.cache.consecutive import moved_up
from kvfold.cache.spans import Span
from kvfold.cache.state import LayerState
from kvfold.kernels.full_precision import full_precision
from kvfold.kernels.gather import pick
from kvfold.store.base import Store
from kvfold.store.dense import DenseStore
from kvfold.store.ragged import RaggedStore
from kvfold.store.sequence import LogicalSequence


class Inserted(NamedTuple):
    """Entries that come in: keys `[B, H, m, D]`, values `[B, H, m, Dv]`, new columns `[B, H, m]`.

    Column −1 is a hole. `bias [B, H, m]`; None: no entry has one.
    """

    keys: Tensor
    values: Tensor
    columns: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Renumbering:
    """A move of a sequence's columns, the same in every row.

    `columns [B, N]` are the new ones, −1 for those that leave; `shifts [B, N]` are the positions by
    which their keys move; `counts [N + 1]` is, for each number of first columns, how many there are
    of them afterwards. `tokens [n]` are the new positions of a row's tokens, −1 for those that
    leave, and later ones follow them by `later` positions; `sequence` is the new one.
    """

    columns: Tensor
    shifts: Tensor
    counts: tuple[int, ...]
    tokens: Tensor
    later: int
    sequence: LogicalSequence

    @classmethod
    def of_replaced(
        cls, sequence: LogicalSequence, rows: int, start: int, stop: int, new: int
    ) -> Renumbering:
        """Tokens `start` to `stop` leave, and `new` others come in their place."""
        valid, count = sequence.tokens(), stop - start
        columns = torch.arange(sequence.seen).expand(rows, -1)
        positions = columns
        if valid is not None:
            columns = columns.to(valid.device)
            positions = sequence.positions(columns).masked_fill(~valid, -1)
        gone = (positions >= start) & (positions < stop)
        kept, left = ~gone, gone.cumsum(-1)
        later = kept & (left == count) if count else positions >= stop
        columns = (kept.cumsum(-1) - 1 + new * later).masked_fill(gone, -1)
        counts = (0, *(kept.cumsum(-1) + new * (later | (left > 0))).amax(0).tolist())
        if valid is not None:
            of_kept = valid[kept].view(rows, -1)
            valid = valid.new_ones(rows, of_kept.shape[1] + new)
            valid.scatter_(1, columns[kept].view(rows, -1), of_kept)
        tokens = torch.arange(int(positions.max()) + 1)
        tokens = torch.where(tokens < stop, tokens, tokens + new - count)
        tokens[start:stop] = -1
        shifts = (new - count) * later.long()
        after = LogicalSequence(sequence.seen + new - count, valid)
        return cls(columns, shifts, counts, tokens, new - count, after)

    @classmethod
    def of_moved(cls, rows: int, seen: int, start: int, stop: int, to: int) -> Renumbering:
        """Tokens `start` to `stop` of rows without padding are put before token `to`."""
        order = [*range(start), *range(stop, seen)]
        at = to if to <= start else to - (stop - start)
        order[at:at] = range(start, stop)
        tokens = torch.empty(seen, dtype=torch.long)
        tokens[torch.tensor(order)] = torch.arange(seen)
        low, high = min(start, to), max(stop, to)
        counts = tuple(high if low < count < high else count for count in range(seen + 1))
        columns = tokens.expand(rows, -1)
        return cls(columns, columns - torch.arange(seen), counts, tokens, 0, LogicalSequence(seen))

    def then(self, other: Renumbering) -> Renumbering:
        """This renumbering and then `other`, of the sequence that it leaves; keys move once."""
        columns = pick(other.columns, self.columns, -1)
        shifts = self.shifts + pick(other.shifts, self.columns, 0)
        counts = tuple(other.counts[count] for count in self.counts)
        tokens = pick(other.tokens, self.tokens, -1)
        later = self.later + other.later
        return Renumbering(columns, shifts, counts, tokens, later, other.sequence)

    def first_tokens(self, count: int) -> int:
        """Number of the first `count` tokens that stay in place."""
        stay = self.tokens[:count]
        stay = stay[stay >= 0].sort().values
        return int((stay == torch.arange(len(stay))).byte().cumprod(0).sum())

    def spans(self, span: Span) -> list[Span]:
        """New places of a span's tokens; those not read yet follow the others."""
        (start, stop), known = span, len(self.tokens)
        places = self.tokens[start:stop]
        found: list[Span] = []
        for place in places[places >= 0].sort().values.tolist():
            joins = bool(found) and found[-1][1] == place
            begin = found.pop()[0] if joins else place
            found.append((begin, place + 1))
        if stop > known:
            found.append((max(start, known) + self.later, stop + self.later))
        return found

    def to(self, device: torch.device) -> Renumbering:
        """The same on a device."""
        return replace(self, columns=self.columns.to(device), shifts=self.shifts.to(device))

    def ids(self, ids: Tensor, new: Tensor | None = None, first: int = 0) -> Tensor:
        """Token ids `[B, n′]` of the new first columns, from `ids [B, n]` of the old ones.

        `new [B, m]` are those of the columns from `first` on; the first id that is not known ends
        the result.
        """
        places = self.columns[:, : ids.shape[1]].to(ids.device)
        found = ids.new_full((len(ids), self.sequence.seen + 1), -1)
        found.scatter_(1, places.masked_fill(places < 0, self.sequence.seen), ids)
        if new is not None:
            found[:, first : first + new.shape[1]] = new.to(ids)
        found[:, -1] = -1
        return found[:, : int((found < 0).any(0).byte().argmax())].clone()


@full_precision
def renumbered(state: LayerState, by: Renumbering, inserted: Inserted | None = None) -> LayerState:
    """A copy of a layer's state with renumbered entries; the state and its views stay valid.

    Entries whose column leaves are dropped, those of `inserted` are added.
    """
    by = by.to(state.stored().keys.device)
    store = state.stored()
    keys, values = store.dense()
    if state.reindexed is not None:
        keys = state.keys_as_given()
    heads = keys.shape[1]
    columns = pick(by.columns[:, None].expand(-1, heads, -1), store.columns, -1)
    shifts = pick(by.shifts[:, None].expand(-1, heads, -1), store.columns, 0)
    keys = _rotated(state, keys, shifts)
    if inserted is not None:
        keys, values = torch.cat([keys, inserted.keys], 2), torch.cat([values, inserted.values], 2)
        columns = torch.cat([columns, inserted.columns], 2)
    slots, bias = _by_column(columns), _joined_bias(store, inserted)
    valid = by.sequence.valid
    other = replace(
        state,
        store=_stored(store, keys, values, columns, slots, by.sequence, bias),
        sequence=replace(by.sequence, valid=None if valid is None else valid.clone()),
        observers=copy.deepcopy(state.observers),
        surplus=None,  # heads may have lost different numbers of entries
        evictions=state.evictions + bool(state.evictions),  # kept scores are of before the edit
        evicted_at=by.counts[state.evicted_at],
        settled=by.counts[state.settled],
        turn_end=None if state.turn_end is None else by.counts[state.turn_end],
        next_round=_next_round(state, by),
        reindexed=None,
    )
    other.observers.select(slots)
    if other.observers.moves.moves is not None:
        _close_gaps(other)
    if isinstance(other.store, RaggedStore):
        other.stay()  # it gives back only what is appended from now on
    other.observers.renumber(state, by.columns, by.shifts)
    if state.reindexed is not None:
        other.let_sinks_move()
        other.settle_sinks()
    return other


def _next_round(state: LayerState, by: Renumbering) -> int | None:
    """Columns of the edited sequence at which entries leave next."""
    rounds, seen = state.plan.stages.rounds, by.sequence.seen
    if rounds is None or state.turn_end is None or state.next_round is None:
        return state.next_round
    if rounds.counting == "absolute":
        return rounds.after(seen, by.counts[state.turn_end])
    return state.next_round + seen - state.seen


def _joined_bias(store: Store, inserted: Inserted | None) -> Tensor | None:
    """Bias of a store's entries and of the inserted ones `[B, H, T + m]`; None: none has one."""
    if inserted is None:
        return store.bias
    if store.bias is None and inserted.bias is None:
        return None
    both = ((store.bias, store.columns), (inserted.bias, inserted.columns))
    return torch.cat(
        [
            torch.zeros(of.shape, dtype=torch.float32, device=of.device) if bias is None else bias
            for bias, of in both
        ],
        -1,
    )


def _close_gaps(state: LayerState) -> None:
    """Moves keys at consecutive positions up again, after entries between them have left."""
    columns = state.stored().columns
    every = _by_column(columns)
    (keys, values), moves = moved_up(state, every)
    state.observers.moves.set(moves)
    columns = pick(columns, every, -1)
    bias = state.stored().bias
    bias = None if bias is None else pick(bias, every, 0)
    slots = _by_column(columns)
    state.put(_stored(state.stored(), keys, values, columns, slots, state.sequence, bias))


def _rotated(state: LayerState, keys: Tensor, shifts: Tensor) -> Tensor:
    """Keys `[B, H, T, D]` moved by `shifts [B, H, T]` positions; others are not touched."""
    moving = shifts.ne(0).flatten(0, 1).any(0).nonzero().squeeze(-1)
    if not len(moving):
        return keys
    turned = state.plan.rotation(keys[:, :, moving], shifts[:, :, moving])
    return keys.index_copy(2, moving, turned)


def _by_column(columns: Tensor) -> Tensor:
    """Slots `[B, H, K]` of the entries by their `columns [B, H, T]`, ascending; −1 on the left."""
    ordered, slots = columns.sort(dim=-1, stable=True)
    slots = slots.masked_fill(ordered < 0, -1)
    return slots[..., int((slots < 0).sum(-1).min()) :]


def _stored(
    old: Store,
    keys: Tensor,
    values: Tensor,
    columns: Tensor,
    slots: Tensor,
    sequence: LogicalSequence,
    bias: Tensor | None,
) -> Store:
    """A store of the same kind with the entries at `slots`, in their `columns [B, H, T]`."""
    if isinstance(old, RaggedStore):
        made = RaggedStore(keys, values, columns, slots, old.encode, bias)
        made.begin_beside(old)
        made.encode_due(decoding=False, place=sequence.positions)
        if old.encode.standalone:
            stay = slots.masked_fill(slots >= old.length, -1)
            unmoved = (keys[:, :, : old.length] == old.dense()[0]).all(-1)
            made.keep_codes(old, stay.masked_fill(~pick(unmoved, stay, False), -1), stay)
        if old.hot is not None:
            made.warm(pick(old.hot, slots.masked_fill(slots >= old.length, -1), False))
        return made
    store = DenseStore(keys, values)
    if bias is not None:
        store.set_bias(bias)
    store.keep(slots)
    columns = pick(columns, slots, -1)
    if columns.shape[-1] == sequence.seen and bool((columns >= 0).all()) and bias is None:
        return DenseStore(store.keys, store.values)  # slot i is column i, as in a stock cache
    store.place(columns)
    return store
