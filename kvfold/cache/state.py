# SPDX-License-Identifier: Apache-2.0
"""`LayerState`: everything that the cache holds for one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.cache.barrier import Barrier
from kvfold.cache.phase import Phase
from kvfold.cache.plan import Plan
from kvfold.kernels.gather import alive
from kvfold.methods.observation import Observation
from kvfold.methods.stages.select.choose import Chosen
from kvfold.methods.stages.when import AtEnd
from kvfold.observers.base import Need, Needs
from kvfold.observers.of_layer import Observers
from kvfold.store.base import Store
from kvfold.store.dense import DenseStore
from kvfold.store.ragged import RaggedStore
from kvfold.store.reindexed_sinks import ReindexedSinks
from kvfold.store.sequence import LogicalSequence

# Tensors of a state by what their axes follow; the loops below, forks and files go by these.
PER_HEAD = ("merging", "head_sizes")  # [B, H]
PER_ROW = ("capacity",)  # [B], as reports


@dataclass(eq=False)
class LayerState:
    """Entries of one layer, their columns, and the layer's observations.

    `plan` is the layer's own; `phase` and `barrier` are shared by all layers of the cache. Evictors
    (`prefill.py`, `decode.py`) are functions that change a state.
    """

    plan: Plan
    phase: Phase
    barrier: Barrier[LayerState]
    observers: Observers
    store: Store | None = None
    sequence: LogicalSequence = field(default_factory=LogicalSequence)
    evictions: int = 0  # of all kinds so far: each draws a seed of its own
    evicted_at: int = 0  # tokens seen at the last change that no crop undoes
    settled: int = 0  # tokens seen when the layer was last brought to its budget
    capacity: Tensor | None = None  # entries that a row holds while decoding
    merging: Tensor | None = None  # the merge stage's state of each head
    head_sizes: Tensor | None = None  # entries that a head holds while decoding, −1 if not set yet
    turn_end: int | None = None  # tokens seen when the last turn ended (`Rounds`)
    next_round: int | None = None  # tokens seen at which entries leave next (`Rounds`, `Once`)
    surplus: int | None = None  # entries above capacity; None: not as many in all heads
    # What stages measured: `error [B, 1 or 2]` of the layer's output, `refit [B, 4]` of the last
    reports: dict[str, Tensor] = field(default_factory=dict)
    over_budget: bool = False  # the forced set was larger than the budget
    reindexed: ReindexedSinks | None = None  # sinks, once entries have left
    # A capacity tensor with its least and its most, and the ends that they force: asked only once.
    _capacities: tuple[Tensor | None, int, int] = (None, 0, 0)
    _ends: tuple[Tensor | None, tuple[int, int] | None] = (None, None)

    def reset(self) -> None:
        """Resets everything but the plan and the objects shared by all layers."""
        new = LayerState(self.plan, self.phase, self.barrier, self.observers.fresh())
        for each in fields(self):
            setattr(self, each.name, getattr(new, each.name))

    # --- stores -----------------------------------------------------------------------------

    def stored(self) -> Store:
        """The store of a layer that has been written to."""
        assert self.store is not None
        return self.store

    def dense_store(self) -> DenseStore:
        """The store of a layer all of whose heads hold equally many entries."""
        assert isinstance(self.store, DenseStore)
        return self.store

    def ragged_store(self) -> RaggedStore:
        """The store of a layer whose heads differ, or whose entries are quantized."""
        assert isinstance(self.store, RaggedStore)
        return self.store

    # --- what observers see -----------------------------------------------------------------

    @property
    def needs(self) -> Needs:
        """Observations that the layer makes."""
        return self.plan.stages.needs

    @property
    def evicts_later(self) -> bool:
        """True if entries leave after the prefill's end, too."""
        return not isinstance(self.plan.stages.when, AtEnd)

    def token_ids(self) -> Tensor | None:
        """Token ids `[B, N]` of all columns, −1 where unknown; None if all are."""
        return self.phase.ids(self.seen, self.stored().keys.device)

    def log(self, kind: type[Need[Any]]) -> Any:
        """The part of an observation that all layers share."""
        return self.phase.logs[kind]

    def stay(self) -> None:
        """Notes a change that no crop undoes."""
        self.evicted_at = self.sequence.seen

    def put(self, store: Store, sequence: LogicalSequence | None = None) -> None:
        """Takes a store for the layer's own; its entries are of a `sequence`, None: of the same."""
        self.store, self.sequence = store, sequence or self.sequence

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new entries `[B, H, S, D]`; returns the raw keys and values stored."""
        store, new = self.store, keys.shape[2]
        if store is None:
            store = self.store = DenseStore(keys, values)
            stored = store.dense()
        else:
            own = self.phase.frozen or self.phase.own_size is not None
            if new > 1 and not own and store.dead:
                self.copy_alive()
            stored = store.append(keys, values, self.sequence.seen)
        self.sequence.grow(new)
        if self.surplus is not None:
            self.surplus += new
        if self.reindexed is not None:
            self.settle_sinks()  # in place
        return stored

    # --- where entries stand ----------------------------------------------------------------

    @property
    def seen(self) -> int:
        """Columns of the logical sequence."""
        return self.sequence.seen

    def columns(self) -> Tensor:
        """Logical columns of the stored entries `[B, H, T]`, −1 for padding and holes."""
        return self.sequence.real(self.stored().columns)

    def positions(self) -> Tensor:
        """Positions of the stored entries `[B, H, T]`, −1 for padding and holes."""
        return self.sequence.positions(self.columns())

    def seen_per_row(self) -> Tensor:
        """Tokens seen by each row `[B]`, padding left out."""
        keys = self.stored().keys
        return self.sequence.per_row(len(keys), keys.device)

    def protected(self) -> Tensor:
        """First tokens of each row that are kept beside the budget `[B]`."""
        seen, prefix = self.seen_per_row(), self.phase.prefix
        return torch.zeros_like(seen) if prefix is None else prefix.to(seen.device)

    # --- sizes ------------------------------------------------------------------------------

    def capacities(self) -> tuple[int, int]:
        """The least and the most entries that a row holds while decoding; 0 if none is set."""
        if self._capacities[0] is not self.capacity:
            rows = [0] if self.capacity is None else self.capacity.tolist()
            self._capacities = self.capacity, min(rows), max(rows)
        return self._capacities[1:]

    def forced_ends(self) -> tuple[int, int] | None:
        """Number of first and of last slots that are forced; None if that differs by row."""
        if self.sequence.valid is not None or self.phase.prefix is not None:
            return None
        if self._ends[0] is not self.capacity or self.capacity is None:
            least, most = self.capacities()
            ends = self.plan.stages.forced.ends(least) if least == most else None
            self._ends = self.capacity, ends
        return self._ends[1]

    # --- changes of all tensors at once -------------------------------------------------------

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a copying selection along the batch axis, to everything."""
        if self.store is None:
            return
        longest = self.store.length
        self.store.index(rows)
        # The longest head may be gone: shorter ones are filled up on the left.
        gone = longest - self.store.length
        self.observers.per_entry(lambda x: rows(x[..., gone:]))
        for name in (*PER_HEAD, *PER_ROW):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else rows(tensor))
        self.reports = {name: rows(report) for name, report in self.reports.items()}
        self.sequence.index(rows)
        self.observers.index(rows)
        if self.reindexed is not None:
            self.reindexed.index(rows)

    def crop(self, count: int) -> None:
        """Drops the last `count` tokens, of which nothing was evicted."""
        if count == 0 or self.store is None:
            return
        self.store.crop(count)
        self.sequence.crop(count)
        self.observers.crop(self.seen)
        self.settled = min(self.settled, self.seen)
        self._crop_rounds()
        self.surplus = None if self.surplus is None else self.surplus - count
        length = self.store.length
        self.observers.per_entry(lambda x: x[..., :length].clone())
        self.settle_sinks()

    # --- evictions --------------------------------------------------------------------------

    def applies(self, chosen: Chosen) -> bool:
        """True if entries that are not chosen leave the store, as in every layer of a cache."""
        return True

    def begin_eviction(self, count: int = 1) -> None:
        """Notes that an eviction begins, or `count`: the next draws have another seed."""
        self.evictions += count

    def settle(self) -> None:
        """Notes that the layer has been brought to its budget."""
        self.settled = self.sequence.seen

    def note_eviction(self) -> None:
        """Notes an eviction: no crop goes back before it, and re-indexed sinks move from now on."""
        self.evicted_at = self.sequence.seen
        if self.phase.own_size is None:  # a fork's own entries are later ones of the text
            self.settle()
        if self.plan.stages.positions == "reindex":
            self.let_sinks_move()

    def note_one_left(self, evictions: int, merging: Tensor | None) -> None:
        """As `note_eviction`, of one entry of each head, which hold their capacity again.

        `evictions` are those so far, `merging [B, H]` is the merge stage's state.
        """
        self.surplus, self.evictions, self.merging = 0, evictions, merging
        self.evicted_at = self.settled = self.sequence.seen
        if self.plan.stages.positions == "reindex":
            self.let_sinks_move()

    def note_size(self, capacity: Tensor | None, over_budget: bool | None = None) -> None:
        """Takes the entries `[B]` that a row holds while decoding; None: as many as come."""
        self.capacity = capacity
        self.over_budget = self.over_budget if over_budget is None else over_budget

    def note_surplus(self, exact: bool) -> None:
        """Notes whether every head holds its capacity, and how many more is known from now on."""
        self.surplus = 0 if exact else None

    def note_merging(self, merging: Tensor | None) -> None:
        """Takes the merge stage's state of each head `[B, H]`."""
        self.merging = merging

    def report(self, name: str, numbers: Tensor) -> None:
        """Notes what a stage has measured."""
        self.reports = {**self.reports, name: numbers}

    def adopt(self, plan: Plan, observers: Observers | None = None) -> None:
        """Goes on by another plan, with other observers if any."""
        self.plan, self.observers = plan, observers or self.observers

    def restore(self, **saved: Any) -> None:
        """Takes fields of a saved layer."""
        for name, value in saved.items():
            setattr(self, name, value)

    def begin_rounds(self, observation: Observation) -> None:
        """Notes that a turn has ended: from now on generated tokens are counted (`Rounds`).

        The window queries are kept if the first eviction's window reaches back to them.
        """
        rounds, seen = self.plan.stages.rounds, self.seen
        assert rounds is not None
        self.turn_end, self.head_sizes, self.next_round = seen, None, rounds.after(seen, seen)
        window = self.observers.window.answer
        window.clear()
        if self.next_round - self.seen < window.width:
            assert observation.queries is not None and observation.query_positions is not None
            columns = self.sequence.columns(observation.query_positions[:, None])[:, 0]
            window.add(observation.queries, columns)

    def end_turn(self) -> None:
        """Notes that all entries are of the text before the next turn: no crop goes back."""
        self.evicted_at = self.settled = self.seen
        self.turn_end = None if self.turn_end is None else self.seen

    def wait_for_token(self) -> None:
        """Puts the eviction at a prefill's end off to the first generated token (`Once`)."""
        self.next_round = self.seen + 1

    def end_round(self, left: int | None = None) -> None:
        """Notes that a round has come, `left` tokens after it was due (≤ 0); None: the last."""
        if left is None:
            self.next_round = None
            return
        assert self.next_round is not None and self.plan.stages.interval is not None
        every = self.plan.stages.interval
        self.next_round += every * (-left // every + 1)  # later if tokens came while frozen

    def _crop_rounds(self) -> None:
        """Counts generated tokens anew after a crop: from its end, if that is inside the prompt."""
        rounds = self.plan.stages.rounds
        if rounds is None or self.turn_end is None or self.next_round is None:
            return
        self.turn_end = min(self.turn_end, self.seen)
        after = rounds.after(self.seen, self.turn_end)
        self.next_round = min(self.next_round, after)  # earlier if tokens that stay came frozen

    def note_head_sizes(self, sizes: Tensor, open_: Tensor | None = None) -> None:
        """Takes sizes of heads `[B, H]`; those that are `open_` have none yet."""
        self.head_sizes = sizes if open_ is None else sizes.masked_fill(open_.to(sizes.device), -1)

    def settle_heads(self, stored: Tensor, kept: Tensor) -> None:
        """Sets the sizes of heads `[B, H]` in rows of which entries leave for the first time.

        `stored` and `kept [B, H]` are the entries before and after; the sizes hold for the turn.
        """
        ranks = self.plan.ranks
        whole = [ranks.all(row) for row in (kept == stored).all(-1)]
        open_ = torch.tensor(whole, device=kept.device)[:, None]
        if self.head_sizes is not None:
            kept = torch.where(self.head_sizes < 0, kept, self.head_sizes)
            open_ = open_ & (self.head_sizes < 0)
        self.note_head_sizes(kept, open_)

    def copy_alive(self) -> None:
        """Copies a dense store without its holes; earlier views are not affected."""
        store = self.dense_store()
        self.keep(alive(store.columns))

    def keep(self, slots: Tensor) -> None:
        """Keeps the entries at `slots [B, H, K]`, and what was observed of them.

        A fork keeps all entries that it shares, and equally many of its own in each head.
        """
        store = self.stored()
        if store.own_length:
            shared = store.length - store.own_length
            own = int((slots >= shared).sum(-1).max())
            every = torch.arange(shared, device=slots.device).expand(*slots.shape[:2], -1)
            slots = torch.cat([every, slots[..., slots.shape[-1] - own :]], -1)
        store.keep(slots)
        self.observers.select(slots)

    # --- re-indexed sinks (StreamingLLM) ----------------------------------------------------

    def let_sinks_move(self) -> None:
        """Copies the sinks' keys as given, before the store rotates them for the first time."""
        stages = self.plan.stages
        if stages.positions == "reindex" and self.reindexed is None:
            store, count = self.dense_store(), stages.forced.sinks
            self.reindexed = ReindexedSinks(store, self.sequence, count, self.plan.rotation)

    def settle_sinks(self) -> None:
        """Rotates re-indexed sinks up to the oldest recent token."""
        if self.reindexed is not None:
            self.reindexed.follow(self.dense_store(), self.sequence)

    def return_sinks(self) -> None:
        """Writes the sinks' given keys back into the store, until the next eviction."""
        if self.reindexed is not None:
            self.reindexed.restore(self.dense_store(), self.sequence)
            self.reindexed = None

    def keys_as_given(self) -> Tensor:
        """Stored keys `[B, H, T, D]` before any sink was moved."""
        if self.reindexed is None:
            return self.stored().keys
        return self.reindexed.as_given(self.dense_store(), self.sequence)

    def key_moves(self) -> Tensor | None:
        """Positions by which the oldest stored keys have moved `[B, H, n]`; None if none have."""
        if self.reindexed is None:
            return self.observers.moves.moves
        return self.reindexed.moves(self.dense_store(), self.sequence)

    def key_positions(self) -> Tensor:
        """Positions to which the stored keys are rotated `[B, H, T]`; 0 for padding and holes.

        Where heads hold the same positions by layout, the result is a view of one head's.
        """
        positions, moves = self.positions(), self.key_moves()
        own = positions[:, :1] if positions.stride(1) == 0 else positions
        positions = own.clamp(min=0).expand_as(positions)
        if moves is None:
            return positions
        return positions + F.pad(moves, (0, positions.shape[-1] - moves.shape[-1]))
