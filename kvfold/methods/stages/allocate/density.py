# SPDX-License-Identifier: Apache-2.0
"""D2O's allocation: layers whose attention is dense keep more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvfold.errors import BudgetError
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import ROUNDING, UNLIMITED, largest_remainder
from kvfold.methods.stages.allocate.uniform import named_layers
from kvfold.observers.column_sums import ColumnSums

Norm = Literal["across_layers", "official", "none"]
Shape = Literal["softmax", "uniform", "reciprocal", "exponential"]
Spending = Literal["exact", "official"]
SKIPPED = "d2o:skip_layers"


def column_variance(observation: Observation) -> Tensor:
    """Unbiased variance `[B, H]`, float32, of the column sums over a row's entries.

    Dense attention has a low variance; a single entry has 0. D2O, arXiv 2406.13035, equation 4.
    """
    real = observation.positions >= 0
    sums = observation[ColumnSums].double().masked_fill(~real, 0.0)
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
    """Sizes `[B]`, entries per head, of each layer.

    `statistics` are the layers' variances `[B, H]`, `budget [B]` the mean entries per layer and
    head, `seen [B]` the tokens. F comes from `densities`. A layer's share by `shape`: "softmax" is
    softmax(−F); "uniform" is the same for all; "reciprocal" is in proportion to 1/variance;
    "exponential" is e^−F of the mean, the paper's formula, which leaves a part of the total. All
    others add up to budget × layers. No layer gets more than the tokens seen; the excess goes to
    the others in proportion to their shares. Layers in `skip_layers` stay whole inside the total;
    negative ones count from the end. A row whose budget is at least its tokens gets uniform sizes.

    Raises BudgetError if the skipped layers alone exceed the total, and KvfoldError for one that
    there is not.
    Source: D2O, equation 5 and section 5.4 (Table 4); AIoT-MLSys-Lab/d2o.
    """
    layers = len(statistics)
    skipped = named_layers(skip_layers, layers, SKIPPED)
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
    """Sizes `[B]` of each layer as in the released code; their sum is not the budget.

    Shapes as in `by_density`, but `budget [B]` may be fractional. With ρ = budget / seen, a layer
    keeps the share softmax(−F)·L·ρ of its entries, between 0.01 and 1, the softmax over all L
    layers. Its `recent` entries and its others are rounded down separately. Layers in `skip_layers`
    take part in the softmax and are never compressed; negative ones count from the end. A row whose
    budget is at least its tokens keeps that many. Raises KvfoldError for a layer that there is not.

    Source: AIoT-MLSys-Lab/d2o.
    """
    layers = len(statistics)
    weights = (-densities(statistics, norm)).softmax(0)
    part = (weights * layers * (budget.double() / seen)).clamp(0.01, 1.0)
    newest, others = (seen * part * share + ROUNDING for share in (recent, 1 - recent))
    counts = torch.where(budget >= seen, budget.long(), newest.long() + others.long())
    counts[sorted(named_layers(skip_layers, layers, SKIPPED))] = UNLIMITED
    return list(counts)


def inexact_because(spending: Spending, shape: Shape, skip_layers: Sequence[int]) -> str:
    """Reason why the layers' sizes do not add up to the budget; "" if they do."""
    if shape == "exponential":
        return "the exponential parts do not add up to the whole budget"
    if spending == "exact":
        return ""
    whole = ", ".join(map(str, skip_layers))
    beside = f"layers {whole} stay whole beside it, " if whole else ""
    return f"{beside}the others' parts are rounded down, as released"


def densities(statistics: list[Tensor], norm: Norm) -> Tensor:
    """F of each layer and row `[L, B]`, float64; low where attention is dense.

    "none" is the variance's mean over heads, which saturates the softmax. "across_layers" scales
    that to 0 … 1 over the layers. "official" scales each layer's heads to 0 … 1 and takes their
    mean, so that it measures how unequal the heads are.
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
    """Logarithms `[L, B]` of the layers' shares."""
    if shape == "uniform":
        return torch.zeros_like(densities(statistics, "none"))
    if shape == "reciprocal":
        # Not normalized: the densest layer's 0 would take the whole budget.
        return -densities(statistics, "none").clamp(min=1e-30).log()
    return -densities(statistics, norm)


def _filled(logits: list[float], total: float, most: int) -> list[float]:
    """Shares of `total` in proportion to exp(logits), none above `most`; excess is shared again."""
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
