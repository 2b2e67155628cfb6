# SPDX-License-Identifier: Apache-2.0
"""D2O's budgets: layers whose attention is dense keep more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvfold.errors import BudgetError
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import ROUNDING, UNLIMITED, largest_remainder

Norm = Literal["across_layers", "official", "none"]
Shape = Literal["softmax", "uniform", "reciprocal", "exponential"]
Spending = Literal["exact", "official"]


def column_variance(observation: Observation) -> Tensor:
    """Unbiased variance of a row's column sums over its real entries, `[B, H]` float32.

    Dense attention has a low variance; a single entry has 0. (D2O, arXiv 2406.13035, equation 4.)
    """
    assert observation.column_sums is not None
    real = observation.positions >= 0
    sums = observation.column_sums.double().masked_fill(~real, 0.0)
    count = real.sum(-1, keepdim=True)
    mean = sums.sum(-1, keepdim=True) / count.clamp(min=1)
    squares = (sums - mean).masked_fill(~real, 0.0).square().sum(-1)
    return (squares / (count[..., 0] - 1).clamp(min=1)).float()


def by_density(
    statistics: list[Tensor],
    budget: Tensor,
    seen: Tensor,
    *,
    norm: Norm = "across_layers",
    shape: Shape = "softmax",
    skip_layers: Sequence[int] = (),
) -> list[Tensor]:
    """Entries per head that each row keeps in each layer, `[B]` per layer.

    `statistics` are the layers' variances `[B, H]`, `budget [B]` the entries per layer and head,
    `seen [B]` the tokens. With F from `densities`, a layer's part is softmax(−F), the same for all,
    in proportion to 1/variance, or "exponential", e^−F of the mean: the paper's formula, which
    does not spend the whole total. All others add up to budget × layers. No layer gets more
    than was seen, and what overflows goes to the others in proportion to their parts. Layers in
    `skip_layers`, counted from the end where negative, stay whole inside the total. A row whose
    budget is at least what was seen is shared evenly: nothing has to go.

    Raises BudgetError where the skipped layers alone exceed the total.
    Source: D2O, equation 5 and section 5.4 (Table 4); AIoT-MLSys-Lab/d2o.
    """
    layers = len(statistics)
    skipped = {layer + layers if layer < 0 else layer for layer in skip_layers}
    sharing = [layer for layer in range(layers) if layer not in skipped]
    used = [statistics[layer] for layer in sharing]
    logits = _logits(used, norm, shape).T.tolist() if used else [[]] * len(seen)
    rows = []
    for own, size, tokens in zip(logits, budget.tolist(), seen.tolist(), strict=True):
        if size >= tokens:
            rows.append([size] * layers)
            continue
        whole = layers - len(sharing)
        inside = size * layers - whole * tokens
        if inside < 0:
            raise BudgetError(
                f"{whole} whole layers of {tokens} tokens take {whole * tokens} entries per KV "
                f"head, the budget is {size * layers}: raise it or skip fewer layers"
            )
        if shape == "exponential":
            inside = math.floor(inside * sum(map(math.exp, own)) / len(own) + ROUNDING)
        shares = iter(largest_remainder(_filled(own, inside, tokens), inside, tokens))
        rows.append([next(shares) if layer in sharing else tokens for layer in range(layers)])
    return list(torch.tensor(rows, device=seen.device).T)


def as_released(
    statistics: list[Tensor],
    budget: Tensor,
    seen: Tensor,
    *,
    norm: Norm = "official",
    recent: float = 0.5,
    skip_layers: Sequence[int] = (),
) -> list[Tensor]:
    """What the released code keeps of a layer, `[B]` entries per head: not the budget in sum.

    Shapes as in `by_density`, but that `budget [B]` need not be whole. With ρ its part of what was
    seen, a layer's part is softmax(−F)·L·ρ over all L layers, within 0.01 and 1; of its entries the
    `recent` ones and the others are rounded down apart. Layers in `skip_layers` take part in the
    softmax and are then never compressed. A row whose budget is what was seen or more keeps that.

    Source: AIoT-MLSys-Lab/d2o.
    """
    layers = len(statistics)
    weights = (-densities(statistics, norm)).softmax(0)
    part = (weights * layers * (budget.double() / seen)).clamp(0.01, 1.0)
    newest, others = (seen * part * share + ROUNDING for share in (recent, 1 - recent))
    counts = torch.where(budget >= seen, budget.long(), newest.long() + others.long())
    counts[list(skip_layers)] = UNLIMITED
    return list(counts)


def inexact_because(spending: Spending, shape: Shape, skip_layers: Sequence[int]) -> str:
    """Why the layers' sizes do not add up to the budget; empty where they do."""
    if shape == "exponential":
        return "the exponential parts do not add up to the whole budget"
    if spending == "exact":
        return ""
    whole = ", ".join(map(str, skip_layers))
    beside = f"layers {whole} stay whole beside it, " if whole else ""
    return f"{beside}the others' parts are rounded down, as released"


def densities(statistics: list[Tensor], norm: Norm) -> Tensor:
    """F of each layer and row `[L, B]` float64, low where attention is dense.

    "none" is the mean over heads of the variance, in which the softmax saturates; "across_layers"
    brings it to 0 … 1 over the layers; "official" brings each layer's heads to 0 … 1 and takes
    their mean, so that it compares how unequal the heads are.
    """
    variances = torch.stack(statistics).double()
    if norm == "official":
        low, high = variances.amin(-1, keepdim=True), variances.amax(-1, keepdim=True)
        return ((variances - low) / (high - low + 1e-6)).mean(-1)
    mean = variances.mean(-1)
    if norm == "none":
        return mean
    low, high = mean.amin(0), mean.amax(0)
    return (mean - low) / torch.where(high > low, high - low, 1.0)


def _logits(statistics: list[Tensor], norm: Norm, shape: Shape) -> Tensor:
    """Logarithms of the layers' parts, `[L, B]`."""
    if shape == "uniform":
        return torch.zeros_like(densities(statistics, "none"))
    if shape == "reciprocal":
        # Free of scale, so it needs no norm, whose 0 for the densest layer would leave no other.
        return -densities(statistics, "none").clamp(min=1e-30).log()
    return -densities(statistics, norm)


def _filled(logits: list[float], total: float, most: int) -> list[float]:
    """`total` in proportion to exp(logits), none above `most`; what overflows is shared again."""
    shares, left = [0.0] * len(logits), list(range(len(logits)))
    while left:
        peak = max(logits[i] for i in left)
        parts = {i: math.exp(logits[i] - peak) for i in left}
        scale = total / sum(parts.values())
        full = [i for i in left if parts[i] * scale > most]
        for i in full or left:
            shares[i] = min(float(most), parts[i] * scale)
        total -= most * len(full)
        left = [i for i in left if i not in full] if full else []
    return shares
