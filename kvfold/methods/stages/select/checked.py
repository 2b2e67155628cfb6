# SPDX-License-Identifier: Apache-2.0
"""Stages of a method whose output is checked: slots of `select`, sizes of `heads`."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.methods.base import Stages
from kvfold.methods.observation import Observation
from kvfold.methods.stages.select.top import kept_mask


def checked_slots(
    stages: Stages,
    observation: Observation,
    scores: Tensor,
    forced: Tensor,
    positions: Tensor,
    counts: Tensor,
) -> Tensor:
    """Slots `[B, H, K]` of the select stage, which the other arguments are given to.

    Raises KvfoldError, naming the method, unless they are int64, ascend after holes of −1, hold all
    forced entries, and are no more than `counts [B, H]`.
    """
    assert stages.select is not None
    slots, stored = stages.select(observation, scores, forced, positions, counts), forced.shape[-1]
    if not isinstance(slots, Tensor) or slots.dtype != torch.int64 or slots.dim() != 3:
        raise KvfoldError(f"{stages.method} selects {_told(slots)} where int64 [B, H, K] is wanted")
    earlier, later = slots[..., :-1], slots[..., 1:]
    faults = {
        "slots that do not ascend, −1 for holes first": (later <= earlier) & (later >= 0),
        "holes behind slots": (later < 0) & (earlier >= 0),
        f"slots outside of {stored} entries": (slots < -1) | (slots >= stored),
        "not all forced entries": forced & ~kept_mask(slots.clamp(max=stored - 1), stored),
        "more entries than counts": (slots >= 0).sum(-1) > counts,
    }
    found = torch.stack([wrong.any() for wrong in faults.values()]).tolist()  # waits for a GPU once
    if any(found):
        fault = [*faults][found.index(True)]
        raise KvfoldError(f"{stages.method} selects {fault}")
    return slots


def shared_by_heads(stages: Stages, scores: Tensor, per_head: Tensor) -> Tensor:
    """Entries `[B, H]` of the heads stage, of `scores [B, H, T]` and the mean `per_head [B]`.

    Raises KvfoldError, naming the method, for another shape or dtype.
    """
    assert stages.heads is not None
    sizes, wanted = stages.heads(scores, per_head), scores.shape[:2]
    if not isinstance(sizes, Tensor) or sizes.shape != wanted or sizes.is_floating_point():
        raise KvfoldError(
            f"{stages.method} gives heads {_told(sizes)} where integers {list(wanted)} are wanted"
        )
    return sizes


def _told(given: object) -> str:
    if isinstance(given, Tensor):
        return f"{given.dtype} {list(given.shape)}"
    return f"a {type(given).__name__}"
