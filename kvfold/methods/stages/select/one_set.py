# SPDX-License-Identifier: Apache-2.0
"""One set of tokens for all layers and heads, made of the heads' own sets and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvfold.errors import BudgetError, KvfoldError
from kvfold.methods.stages.select.top import top

Rule = Literal["mass", "votes", "union"]
# "best": each entry counts as in the layer and head that score it highest, the same for all
Level = Rule | Literal["best"]


def one_set(
    kept: Tensor,
    scores: Sequence[Tensor | None],
    forced: Tensor,
    rule: Rule = "mass",
    size: int | None = None,
) -> Tensor:
    """Indices `[K]`, ascending, of one set of tokens. Forced tokens come first; then

    - "mass": the highest sum of scores over all heads, where each head's scores, less their lowest,
      are divided by their sum;
    - "votes": the tokens that most heads keep, of all layers, equal ones by mass;
    - "union": every token that any head keeps. It has no `size`, and exceeds the budget where heads
      differ.

    Args:
        kept: what each head keeps, bool `[L, H, T]`.
        scores: of each layer `[H, T]`; None where every entry stays.
        forced: tokens that stay in some head whatever their score, bool `[T]`.
        rule: see above; of equal tokens the earlier stays.
        size: K; None: the mean of the heads' counts.

    Raises BudgetError for a size below the forced tokens or above all, and KvfoldError for a size
    of the union or another rule.
    """
    votes = kept.flatten(0, 1).sum(0)
    if rule == "union":
        if size is not None:
            raise KvfoldError("the union of all heads has a size of its own: leave size out")
        return votes.nonzero()[:, 0]
    if rule not in ("votes", "mass"):
        raise KvfoldError(f'{rule!r} is no rule for one set: take "votes", "mass" or "union"')
    always = int(forced.sum())
    if size is None:
        size = max(always, int(votes.sum()) // (kept.shape[0] * kept.shape[1]))
    if not always <= size <= len(forced):
        raise BudgetError(
            f"one set of {size} tokens does not fit: {always} of {len(forced)} always stay"
        )
    worth = mass = _mass(scores, forced)
    if rule == "votes":
        worth = votes + mass / (1 + mass.sum())
    ranked = worth.masked_fill(forced, torch.inf)[None, None]
    return top(ranked, torch.tensor([size], device=ranked.device))[0, 0]


def _mass(of_layers: Sequence[Tensor | None], forced: Tensor) -> Tensor:
    """Sum over heads `[T]`, float64, of each head's share of scores; forced ones have none."""
    total = torch.zeros(len(forced), dtype=torch.float64, device=forced.device)
    for scores in of_layers:
        if scores is None:
            continue
        open_ = scores.double().masked_fill(forced, torch.inf)
        above = (open_ - open_.amin(-1, keepdim=True)).masked_fill(forced, 0)
        total += (above / above.sum(-1, keepdim=True).clamp(min=1e-30)).sum(0)
    return total
