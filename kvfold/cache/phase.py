# SPDX-License-Identifier: Apache-2.0
"""When layers compress, and to what."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.budget import Budget
from kvfold.cache.tensor_parallel import Ranks
from kvfold.methods.base import Across, Measured, Stages
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import raised
from kvfold.store.encoding import EntrySize
from kvfold.store.ragged import SegmentStore

if TYPE_CHECKING:
    from kvfold.cache.decode import Holding
    from kvfold.cache.prefill import Compression
    from kvfold.cache.query_window import Attended


@dataclass(frozen=True)
class Repeating:
    """A forward that repeats part of a text of `text` columns.

    `scored [B, N]` are the columns, new ones included, among which its attention is shared out.
    """

    text: int
    scored: Tensor


@dataclass
class Turn:
    """Where the conversation stands; shared by all layers of a cache.

    `until` is the number of tokens at which a turn that is read piece by piece ends. `repeating`
    is set while the text is repeated to a rebuilding method; `prefix [B]` are each row's first
    tokens, kept beside the budget. `gathered` are layers that wait for the others' statistics,
    `partner` one that waits for the other of its pair, `singles` what those attended to of which an
    entry leaves when the others have attended as well. While `driving`, layers run one by one on
    fewer and fewer tokens, and `watched` is what the last of them saw. `own` are the entries per
    KV head to which a reader brings back what it has read itself; None: it keeps them all.
    """

    reading: bool = False
    frozen: bool = False
    until: int = 0
    repeating: Repeating | None = None
    prefix: Tensor | None = None
    gathered: list[tuple[Compression, Observation]] = field(default_factory=list)
    partner: Compression | None = None
    singles: dict[Holding, Attended] = field(default_factory=dict)
    driving: bool = False
    watched: Observation | None = None
    own: int | None = None

    def ends(self, seen: int, new: int) -> bool:
        """Whether a forward of `new` tokens that reached `seen` completes a turn."""
        if self.goes_on(seen):
            return False
        return new > 1 or seen - new < self.until

    def goes_on(self, seen: int) -> bool:
        """Whether more pieces of this turn are to come after `seen` tokens."""
        return self.reading or seen < self.until

    def gather(self, layer: Compression, seen: Observation) -> None:
        """A layer is done; the last one lets all of them compress to sizes shared across them."""
        # As a view, the last queries would keep alive those of the whole prompt.
        queries = None if seen.queries is None else seen.queries.clone()
        self.gathered.append((layer, dataclasses.replace(seen, queries=queries)))
        if len(self.gathered) < layer.plan.layers:
            return
        gathered, self.gathered = self.gathered, []
        across = layer.plan.stages.allocate
        assert isinstance(across, Across) and seen.seen is not None
        statistics = [across.statistic(of_layer) for _, of_layer in gathered]
        free = seen.seen - layer.protected()
        # Without a budget the statistics alone decide.
        budget = free if layer.plan.budget is None else layer.per_head(across.unrounded)
        counts = across.share(statistics, budget, free)
        if layer.plan.budget is not None and not across.per_head:
            counts = _raised(counts, layer.plan.stages.forced.least_of(layer.places()), free)
        for (waiting, of_layer), count in zip(gathered, counts, strict=True):
            waiting.compress(of_layer, count)

    def encode(self, layer: Compression, decoding: bool, seen: Observation | None = None) -> None:
        """Encodes what a layer has due, or what both layers of its pair have."""
        store = layer.store
        assert isinstance(store, SegmentStore)
        if not store.encode.pairs:
            if store.encode_due(decoding, seen):
                layer.evicted_at = layer.seen
        elif self.partner is None:
            self.partner = layer
        else:
            first, self.partner = self.partner, None
            assert isinstance(first.store, SegmentStore)
            if first.store.encode_with(store, decoding):
                first.evicted_at = layer.evicted_at = layer.seen

    def forget(self) -> None:
        """As before the first turn."""
        self.reading = self.frozen = False
        self.until = 0
        self.repeating = self.prefix = self.partner = self.watched = None
        self.driving = False
        self.gathered, self.singles = [], {}


@dataclass(frozen=True)
class Plan:
    """What a layer must know of its cache: method, budget, place, and the seed of random scores.

    `shared`: other layers of the model attend to its entries as well. `latents`: entries become
    keys inside a forward only. `ranks` share its KV heads.
    """

    stages: Stages
    budget: Budget | None
    layer: int
    layers: int
    seed: int
    shared: bool = False
    latents: bool = False
    ranks: Ranks = field(default_factory=Ranks)

    def total(self, tokens: int, size: EntrySize, heads: int, rows: int) -> int:
        """Entries per KV head that one row of so many `tokens` may keep, over all layers."""
        assert self.budget is not None
        if self.budget.kind == "bytes" and self.stages.encode is not None:
            room = self.budget.amount / (rows * heads * self.layers)
            return self.stages.encode.fitting(room, size) * self.layers
        return self.budget.per_layer(tokens, size.whole, self.layers, heads, rows)

    def unrounded(self, tokens: int, size: EntrySize, heads: int, rows: int) -> float:
        """As `total` of one layer, before it is rounded down to whole entries of each head."""
        if self.budget is not None and self.budget.kind == "ratio":
            return self.budget.amount * tokens
        return self.total(tokens, size, heads, rows) / self.layers

    def counts(self, seen: Observation, free: Tensor, size: EntrySize, heads: int) -> Tensor:
        """Entries per KV head of this layer, `[B]` or `[B, H]`, of `free [B]` tokens."""
        allocate = self.stages.allocate
        if isinstance(allocate, Measured):
            return allocate.size(seen)
        assert allocate is not None and not isinstance(allocate, Across)
        per_row, encode = [], self.stages.encode
        for tokens in free.tolist():
            total = self.total(tokens, size, heads, len(free))
            if encode is not None and encode.pairs:
                total -= total % self.layers  # both layers of a pair keep as many
            per_row.append(allocate(total, tokens, self.layers))
        by_layer = list(torch.tensor(per_row, device=free.device).T)
        return _raised(by_layer, self.stages.forced.least_of(seen.positions), free)[self.layer]


def _raised(counts: list[Tensor], least: Tensor, free: Tensor) -> list[Tensor]:
    """Entries per layer `[B]`, each with room for the `least [B]` that is forced, if there is."""
    by_row = torch.stack(counts, -1).tolist()
    rows = zip(by_row, least.tolist(), free.tolist(), strict=True)
    return list(torch.tensor([raised(*row) for row in rows], device=free.device).T)
