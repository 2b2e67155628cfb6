# SPDX-License-Identifier: Apache-2.0
"""What recall reads, as a mask over all entries."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from kvfold.kernels.codebook import looked_up, nearest, rotated, rotated_back
from tests.helpers.truth import Reader, stock_cache

LOT, SINKS, RESIDUAL, READ, BITS = 32, 2, 8, 0.1, 2
SPEC = f"recall:residual={RESIDUAL},sinks={SINKS},read={READ},keys={BITS}"
TRUTH = "recall_truth"


def code_of(keys: Tensor) -> Tensor:
    """Keys as their codes are read: the paper's formula, in the key's own length (float16)."""
    lengths = keys.norm(dim=-1, keepdim=True)
    codes = nearest(rotated(keys / lengths) * keys.shape[-1] ** 0.5, BITS)
    found = looked_up(codes, BITS, keys.dtype)
    return rotated_back(found) * (lengths / found.norm(dim=-1, keepdim=True)).half()


class RecallTruth(Reader):
    """A stock cache whose attention reads, of the first `cold` entries, few anew for each query.

    Layers that slide attend as in transformers.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model, stock_cache(model))
        AttentionInterface.register(TRUTH, self.attend)
        AttentionMaskInterface.register(TRUTH, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        self.cold = 0

    def __call__(self, ids: Tensor, **inputs: Tensor) -> Tensor:
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(TRUTH)
        logits = super().__call__(ids, **inputs)
        self.model.set_attn_implementation(before)
        due = self.cache.get_seq_length() - RESIDUAL
        if ids.shape[1] == 1:
            due -= (due - self.cold) % LOT
        self.cold = max(self.cold, due)
        return logits

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        if options.get("sliding_window"):
            return AttentionInterface()["sdpa"](module, query, key, value, mask, **options)
        _, heads, stored, _ = key.shape
        new = query.shape[2]
        grouped = query[0].unflatten(0, (heads, -1)) * options["scaling"]
        found = torch.einsum("hgsd,hnd->hsgn", grouped, code_of(key[0])).amax(2)
        found[..., :SINKS] = found[..., self.cold :] = -torch.inf
        count = math.ceil(READ * (self.cold - SINKS) - 1e-9) if self.cold > SINKS else 0
        shown = torch.ones(new, stored, dtype=torch.bool).tril(stored - new).expand_as(found)
        read = torch.zeros_like(found, dtype=torch.bool)
        read = read.scatter(-1, found.topk(count, -1).indices, True)
        read[..., :SINKS] = read[..., self.cold :] = True
        logits = torch.einsum("hgsd,hnd->hgsn", grouped, key[0])
        weights = logits.masked_fill(~(shown & read)[:, None], -torch.inf).softmax(-1)
        out = torch.einsum("hgsn,hnd->hgsd", weights, value[0])
        return out.flatten(0, 1).transpose(0, 1)[None], None
