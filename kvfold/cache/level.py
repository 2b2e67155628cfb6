# SPDX-License-Identifier: Apache-2.0
"""One set of tokens of each row for all layers, made of what every head would keep by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.methods.stages.select.choose import Chosen
from kvfold.methods.stages.select.one_set import Rule, one_set
from kvfold.methods.stages.select.top import kept_mask


def alike(own: Sequence[Chosen], positions: Tensor, rule: Rule) -> Tensor:
    """Slots `[B, H, K]` of the one set, −1 for holes, from each layer's own choice.

    `positions [B, H, T]` are the same in all layers and heads, −1 for padding. Slots are on their
    device.
    """
    own = [each.to(positions.device) for each in own]
    kept = torch.stack([kept_mask(each.slots, positions.shape[-1]) for each in own])
    rows = []
    for row, places in enumerate(positions[:, 0]):
        real = (places >= 0).nonzero()[:, 0]
        forced = torch.stack([each.forced[row].any(0) for each in own]).any(0)
        scores = [each.scores[row][:, real] for each in own]
        rows.append(real[one_set(kept[:, row][..., real], scores, forced[real], rule)])
    most = max(map(len, rows))
    slots = torch.stack([F.pad(row, (most - len(row), 0), value=-1) for row in rows])
    return slots[:, None].expand(-1, positions.shape[1], -1)
