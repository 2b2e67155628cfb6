# SPDX-License-Identifier: Apache-2.0
"""Checks of what a method's stages give: slots of `select`, sizes of `heads`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.methods.base import Stages
from kvfold.methods.stages.select.top import kept_mask


def check_slots(stages: Stages, slots: Tensor, forced: Tensor, counts: Tensor) -> None:
    """Raises KvfoldError, naming the method, for a wrong selection `slots [B, H, K]`.

    Slots are int64, ascend after holes of −1, hold all of `forced [B, H, T]`, and are no more than
    `counts [B, H]`.
    """
    if not isinstance(slots, Tensor) or slots.dtype != torch.int64 or slots.dim() != 3:
        raise KvfoldError(f"{stages.method} selects {told(slots)} where int64 [B, H, K] is wanted")
    stored, earlier, later = forced.shape[-1], slots[..., :-1], slots[..., 1:]
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


def check_head_sizes(stages: Stages, sizes: Tensor, wanted: Sequence[int]) -> None:
    """Raises KvfoldError, naming the method, unless sizes of heads are integers `[B, H]`."""
    if not isinstance(sizes, Tensor) or sizes.shape != wanted or sizes.is_floating_point():
        raise KvfoldError(
            f"{stages.method} gives heads {told(sizes)} where integers {list(wanted)} are wanted"
        )


def told(given: object) -> str:
    """What a stage gave, in words: dtype and shape of a tensor, else its type."""
    if isinstance(given, Tensor):
        return f"{given.dtype} {list(given.shape)}"
    return f"a {type(given).__name__}"
