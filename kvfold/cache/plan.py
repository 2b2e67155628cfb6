# SPDX-License-Identifier: Apache-2.0
"""The plan of one layer: method, budget, place in the model, and its size in entries."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.budget import Budget
from kvfold.cache.tensor_parallel import Ranks
from kvfold.errors import BudgetError, KvfoldError
from kvfold.methods.base import Across, Measured, Method, Stages
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import UNLIMITED, raised
from kvfold.observers.stored import OutputNorms, PreviousScores
from kvfold.store.encoding import EntrySize

if TYPE_CHECKING:  # a layer without a model brings a RoPE and weights of its own
    from kvfold.hf.output_projection import OutputProjection
    from kvfold.hf.rotation import Rotation


@dataclass(frozen=True)
class Plan:
    """Method, budget and place of one layer, and the seed of random scores.

    `rotation` is its RoPE, `projection` its W_o. `shared`: other layers of the model attend to its
    entries as well. `caches_latents`: entries become keys inside a forward only. `ranks` share its
    KV heads. `keep_scores`: scores stay with the entries that an eviction keeps.
    """

    stages: Stages
    budget: Budget | None
    layer: int
    layers: int
    seed: int
    rotation: Rotation
    projection: OutputProjection
    shared: bool = False
    caches_latents: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    keep_scores: bool = False

    def by(self, stages: Stages) -> Plan:
        """The layer's plan by other stages; it may be one that does not encode.

        Raises UnsupportedModel where the layer lacks what the stages read or change:

        - Keys cannot be moved, and positions are to be re-indexed.
        - Keys cannot be rotated back, and the method reads keys or queries before RoPE.
        - The projection is not known, and the method reads norms of projected values.
        """
        if stages.positions != "original":
            self.rotation.check()
        if stages.needs.rotated_back:
            self.rotation.check_reversible()
        if OutputNorms in stages.needs:
            self.projection.check()
        encode = stages.encode and stages.encode.of_layer(self.layer, self.layers)
        if encode is not None:
            encode = encode.beside_rope(None if self.rotation.irreversible() else self.rotation)
        return replace(self, stages=replace(stages, encode=encode))

    @property
    def scores_stay(self) -> bool:
        """True if the scores of kept entries are held, for smaller budgets or the next eviction."""
        return self.keep_scores or PreviousScores in self.stages.needs

    def total(self, tokens: int, size: EntrySize, heads: int, rows: int) -> int:
        """Entries per KV head that a row of `tokens` may keep, summed over all layers."""
        assert self.budget is not None
        if self.budget.kind == "bytes" and self.stages.encode is not None:
            room = self.budget.amount / (rows * heads * self.layers)
            return self.stages.encode.fitting(room, size) * self.layers
        return self.budget.per_layer(tokens, size.whole, self.layers, heads, rows)

    def unrounded(self, tokens: int, size: EntrySize, heads: int, rows: int) -> float:
        """As `total`, for one layer and before rounding down to whole entries of each head."""
        if self.budget is not None and self.budget.kind == "ratio":
            return self.budget.amount * tokens
        return self.total(tokens, size, heads, rows) / self.layers

    def counts(
        self, observation: Observation, free: Tensor, whole: Tensor, size: EntrySize, heads: int
    ) -> Tensor:
        """Entries per KV head of this layer, `[B]` or `[B, H]`, of `free [B]` tokens.

        Nothing leaves the rows `whole [B]`.
        """
        allocate = self.stages.allocate
        if isinstance(allocate, Measured):
            return allocate.size(observation)
        per_row, encode = [], self.stages.encode
        for tokens, stays in zip(free.tolist(), whole.tolist(), strict=True):
            if stays:
                per_row.append([UNLIMITED] * self.layers)
                continue
            total = self.total(tokens, size, heads, len(free))
            if self.stages.rounds:
                tokens = max(tokens, total // self.layers)  # the answer fills what a prompt leaves
            if self.stages.shape == "best" or (encode is not None and encode.pairs):
                total -= total % self.layers  # layers that agree, or are a pair, keep as many
            per_row.append(checked_sizes(self.stages, total, tokens, self.layers))
        by_layer = list(torch.tensor(per_row, device=free.device).T)
        return with_forced_room(by_layer, self.stages.forced.least_of(observation.positions), free)[
            self.layer
        ]


def checked_sizes(stages: Stages, total: int, tokens: int, layers: int) -> list[int]:
    """Entries per KV head of each layer, by the method's schedule.

    Raises KvfoldError, naming the method, unless it gives one whole number for each layer.
    """
    allocate = stages.allocate
    assert allocate is not None and not isinstance(allocate, (Across, Measured))
    sizes = allocate(total, tokens, layers)
    whole = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
    if not whole or len(sizes) != layers:
        raise KvfoldError(
            f"{stages.method} allocates {sizes} where a list of {layers} whole numbers from 0 on "
            "is wanted: the entries per KV head of each layer"
        )
    return sizes


def with_forced_room(counts: list[Tensor], least: Tensor, free: Tensor) -> list[Tensor]:
    """Sizes `[B]` of each layer, raised to the forced `least [B]` as far as the sum allows."""
    rows = zip(torch.stack(counts, -1).tolist(), least.tolist(), free.tolist(), strict=True)
    return list(torch.tensor([raised(*row) for row in rows], device=free.device).T)


def checked_budget(
    method: Method, budget: Budget | float | str | None, least: int
) -> Budget | None:
    """The budget of a method that keeps `least` entries per KV head at any budget.

    Raises BudgetError for one that is missing, superfluous, or below that.
    """
    if method.takes_budget and budget is None:
        raise BudgetError(
            f'{method} needs a budget: the part to keep (0.2), tokens (512) or a size ("2GiB")'
        )
    if not method.takes_budget and budget is not None:
        raise BudgetError(f"{method} takes no budget: leave it out")
    if budget is None:
        return None
    made = Budget.of(budget)
    if made.kind == "tokens" and made.amount < least:
        raise BudgetError(
            f"{method} always keeps {least} entries per KV head (sinks, window, protected spans), "
            f"the budget is {int(made.amount)}: raise it to at least {least}"
        )
    return made
