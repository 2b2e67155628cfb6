# SPDX-License-Identifier: Apache-2.0
"""Allocation of a layer's size among its heads (AdaKV)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Rule = Literal["floor", "blend"]


def adaptive(
    scores: Tensor,
    per_head: Tensor,
    *,
    floor: float = 0.2,
    rule: Rule = "floor",
    normalize: bool = False,
) -> Tensor:
    """Sizes int64 `[B, H]` of the heads: their number of entries among the layer's best.

    scores `[B, H, T]`, −inf for entries that are no candidates; `per_head [B]` is the mean size,
    without forced entries. `rule="floor"` gives each head `int(per_head·floor)` entries and the
    rest to the best of all heads; rows add up to `H·per_head` if there are so many candidates.
    `rule="blend"` allocates everything by score and mixes the result with the uniform one, rounding
    half to even, so that a row may miss its sum by H/2. `normalize` weighs each head by the share
    of its scores (assumed to be 0 or more) that its best `per_head` entries hold. Of equal scores
    the earlier head, then the earlier entry wins.

    Source: Feng et al., algorithm 1 (arXiv 2407.11550); FFY0/AdaKV `monkeypatch/snapkv_utils.py`.
    """
    ordered = scores.sort(dim=-1, descending=True, stable=True).values
    if normalize:
        values = ordered.masked_fill(ordered == -torch.inf, 0.0)
        best = torch.arange(ordered.shape[-1], device=ordered.device) < per_head.view(-1, 1, 1)
        whole = values.sum(-1, keepdim=True)
        weight = (values * best).sum(-1, keepdim=True) / whole.masked_fill(whole == 0, 1.0)
        ordered = (values * weight).masked_fill(ordered == -torch.inf, -torch.inf)
    total = per_head * scores.shape[1]
    least = (per_head.double() * floor).long()[:, None]
    if rule == "floor":
        return _shared_out(ordered, least, total)
    by_score = _shared_out(ordered, torch.zeros_like(least), total)
    blended = (by_score.double() * (1 - floor) + least).round().long()
    return torch.minimum(blended, (ordered > -torch.inf).sum(-1))


def _shared_out(ordered: Tensor, least: Tensor, total: Tensor) -> Tensor:
    """Sizes `[B, H]`: the best `least [B, 1]` of each head, then the best of all up to `total [B]`.

    `ordered [B, H, T]` are scores in descending order.
    """
    safe = torch.minimum(least, (ordered > -torch.inf).sum(-1))
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    open_ = ordered.masked_fill(rank < safe[..., None], -torch.inf).flatten(1)
    rest = torch.minimum(total - safe.sum(-1), (open_ > -torch.inf).sum(-1))
    order = open_.argsort(dim=-1, descending=True, stable=True)
    first = torch.arange(open_.shape[-1], device=open_.device) < rest[:, None]
    won = torch.zeros_like(first).scatter(1, order, first)
    return safe + won.view_as(ordered).sum(-1)
