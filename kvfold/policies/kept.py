# SPDX-License-Identifier: Apache-2.0
"""`Kept`: the entries that a policy keeps, for each head by itself or one set for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvfold.errors import BudgetError, KvfoldError
from kvfold.methods.stages.select.top import top

Rule = Literal["mass", "votes", "union"]


@dataclass(frozen=True, eq=False)
class Kept:
    """Entries of one row that each KV head keeps.

    `indices[layer][head]` are numbers of tokens, int64, ascending; heads may differ in how many.
    """

    indices: tuple[tuple[Tensor, ...], ...]
    tokens: int  # T
    scores: tuple[Tensor | None, ...]  # [H, T] of each layer; None where every entry stays
    forced: Tensor  # [T], bool: tokens that stay in some head whatever their score

    @property
    def counts(self) -> Tensor:
        """Entries that each head keeps `[L, H]`."""
        return torch.tensor([[len(head) for head in layer] for layer in self.indices])

    def mask(self) -> Tensor:
        """Bool mask `[L, H, T]` of the entries that stay."""
        heads = [head for layer in self.indices for head in layer]
        mask = torch.zeros(len(heads), self.tokens, dtype=torch.bool, device=self.forced.device)
        for row, head in zip(mask, heads, strict=True):
            row[head] = True
        return mask.view(len(self.indices), -1, self.tokens)

    def shared(self, rule: Rule = "mass", size: int | None = None) -> Tensor:
        """Indices `[K]`, ascending, of one set of tokens for all layers and heads.

        An engine whose block tables hold whole tokens needs one set. Forced tokens come first; then

        - "mass": the highest sum of scores over all heads, where each head's scores, less their
          lowest, are divided by their sum;
        - "votes": the tokens that most heads keep, of all layers, equal ones by mass;
        - "union": every token that any head keeps. It has no `size`, and exceeds the budget where
          heads differ.

        `size` is K, None: the mean of the heads' counts. Of equal tokens the earlier stays. Raises
        BudgetError for a size below the forced tokens or above all, and KvfoldError for a size of
        the union or another rule.
        """
        votes = self.mask().flatten(0, 1).sum(0)
        if rule == "union":
            if size is not None:
                raise KvfoldError("the union of all heads has a size of its own: leave size out")
            return votes.nonzero()[:, 0]
        if rule not in ("votes", "mass"):
            raise KvfoldError(f'{rule!r} is no rule for one set: take "votes", "mass" or "union"')
        counts, forced = self.counts, int(self.forced.sum())
        if size is None:
            size = max(forced, int(counts.sum()) // counts.numel())
        if not forced <= size <= self.tokens:
            raise BudgetError(
                f"one set of {size} tokens does not fit: {forced} of {self.tokens} always stay"
            )
        worth = mass = self._mass()
        if rule == "votes":
            worth = votes + mass / (1 + mass.sum())
        ranked = worth.masked_fill(self.forced, torch.inf)[None, None]
        return top(ranked, torch.tensor([size], device=ranked.device))[0, 0]

    def _mass(self) -> Tensor:
        """Sum over heads `[T]`, float64, of each head's share of scores; forced ones have none."""
        total = torch.zeros(self.tokens, dtype=torch.float64, device=self.forced.device)
        for scores in self.scores:
            if scores is None:
                continue
            open_ = scores.double().masked_fill(self.forced, torch.inf)
            above = (open_ - open_.amin(-1, keepdim=True)).masked_fill(self.forced, 0)
            total += (above / above.sum(-1, keepdim=True).clamp(min=1e-30)).sum(0)
        return total
