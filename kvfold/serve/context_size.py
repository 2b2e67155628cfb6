# SPDX-License-Identifier: Apache-2.0
"""The size of a context before it is compressed, from tokens, budget and the model's shape."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.hf.models import read_tokens
from kvfold.methods.base import Across, Measured, Method
from kvfold.methods.stages.allocate.parts import LayerParts

# Methods round sizes of layers and heads: so much of a budget is kept for certain.
CERTAIN = 0.95


@torch.no_grad()
def bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of one token in a full cache of all compressed layers, as a forward stores it."""
    cache = CompressedCache(model, "full")
    read_tokens(model, torch.zeros(1, 1, dtype=torch.long, device=model.device), cache, None)
    return cache.stats().nbytes_full


def least_bytes(method: Method, budget: Budget | None, tokens: int, per_token: int) -> int:
    """Bytes that a context of `tokens` takes at least; 0 where its method alone decides.

    Encoded entries are smaller than those of a full cache, by the method.
    """
    stages = method.stages()
    if stages.encode is not None or stages.inexact or isinstance(stages.allocate, Measured):
        return 0
    # A layer with more than the text's tokens leaves none to others.
    if isinstance(stages.allocate, Across) and isinstance(stages.allocate.parts, LayerParts):
        return 0
    full = tokens * per_token
    if budget is None:
        return full if stages.allocate is None and not stages.runs_own_forwards else 0
    if budget.kind == "ratio":
        kept = budget.amount * full
    else:
        kept = budget.amount * (per_token if budget.kind == "tokens" else 1)
    return int(CERTAIN * min(full, kept))
