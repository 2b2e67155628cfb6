# SPDX-License-Identifier: Apache-2.0
"""A cache after one prefill of prompts of different lengths, padded on the left."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvfold
from tests.helpers.models import prompts

LENGTHS = (64, 53, 24)


def kept(
    model: PreTrainedModel, spec: str, budget: int | float | None = None
) -> tuple[Tensor, kvfold.CompressedCache]:
    """Entries after a padded prefill, `[L, B, H]`, and the cache."""
    ids, mask = prompts(LENGTHS)
    cache = kvfold.CompressedCache(model, spec, budget)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    return torch.tensor(cache.stats().kept), cache
