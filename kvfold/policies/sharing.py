# SPDX-License-Identifier: Apache-2.0
"""Loss of keeping one set of tokens for all heads, instead of a set for each head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.policies.method_policy import Kept
from kvfold.policies.prefill import Prefill

QUERIES = 32  # last queries whose attention is measured


@dataclass(frozen=True)
class SharingLoss:
    """Loss of one set of tokens for all heads against the heads' own sets; parts from 0 to 1.

    `mass_*`: attention of the last queries that falls on kept entries, mean over queries, query
    heads and layers. `error_*`: ‖o' − o‖ / ‖o‖ of a head's output o, without evicted entries o',
    the same mean. None where no queries are at hand. `overlap`: part of the heads' own entries that
    the shared set holds.
    """

    own: float  # mean entries of a head
    shared: int  # tokens of the one set
    overlap: float
    mass_own: float | None = None
    mass_shared: float | None = None
    error_own: float | None = None
    error_shared: float | None = None


@torch.no_grad()
def sharing_loss(kept: Kept, shared: Tensor, prefill: Prefill) -> SharingLoss:
    """The loss of keeping `shared [K]` in all layers and heads, instead of what each head keeps."""
    own = kept.mask()
    one = torch.zeros_like(kept.forced).index_fill(0, shared, True)
    overlap = float((own & one).sum() / own.sum().clamp(min=1))
    mean = float(own.sum()) / own.shape[0] / own.shape[1]
    if not prefill.window:
        return SharingLoss(mean, len(shared), overlap)
    measured = torch.tensor(list(_of_layers(own, one.expand_as(own[0]), prefill))).mean(0)
    return SharingLoss(mean, len(shared), overlap, *measured.tolist())


def _of_layers(own: Tensor, one: Tensor, prefill: Prefill) -> Iterator[list[float]]:
    """Mass by own sets and by one, and errors of the output likewise, of each layer."""
    for layer, mask in enumerate(own):
        observation = prefill.observed(layer, QUERIES)
        rows = observation.window_attention(observation.window)[0]
        values, groups = observation.values[0].float(), len(rows) // len(mask)
        values = values.repeat_interleave(groups, 0)
        whole, total = rows @ values, rows.sum(-1)
        masses, errors = [], []
        for each in (mask, one):
            left = rows * each.repeat_interleave(groups, 0)[:, None]
            mass = left.sum(-1)
            # What sink logits take stays in the denominator.
            out = left @ values / (1 - total + mass).clamp(min=1e-30)[..., None]
            far = (out - whole).norm(dim=-1) / whole.norm(dim=-1).clamp(min=1e-30)
            masses.append(float(mass.mean()))
            errors.append(float(far.mean()))
        yield [*masses, *errors]
