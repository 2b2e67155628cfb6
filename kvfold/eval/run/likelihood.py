# SPDX-License-Identifier: Apache-2.0
"""Negative log-likelihoods of a text under a compressed cache."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache


@torch.no_grad()
def token_by_token(model: PreTrainedModel, cache: CompressedCache, ids: Tensor) -> Tensor:
    """−log p in nats of all tokens of `ids [1, S]` but the first, `[S − 1]`.

    One forward per token, so that the cache evicts after each as in decoding (StreamingLLM, arXiv
    2309.17453, `examples/eval_long_ppl.py`); one forward over the whole text would evict nothing.
    """
    found = []
    for index in range(ids.shape[1] - 1):
        out = model(input_ids=ids[:, index : index + 1], past_key_values=cache, use_cache=True)
        found.append(_nll(out.logits, ids[:, index + 1 : index + 2]))
    return torch.cat(found)


@torch.no_grad()
def at_once(model: PreTrainedModel, cache: CompressedCache, ids: Tensor) -> Tensor:
    """−log p in nats of all tokens of `ids [1, S]` but the first, given the cache, `[S − 1]`.

    The cache must be frozen or a fork, else the text would be compressed as a turn.
    """
    out = model(input_ids=ids, past_key_values=cache, use_cache=True)
    return _nll(out.logits[:, :-1], ids[:, 1:])


def _nll(logits: Tensor, following: Tensor) -> Tensor:
    """−log p in nats `[S]` of the tokens `following [1, S]` under `logits [1, S, V]`."""
    likely = logits[0].float().log_softmax(-1).gather(-1, following[0, :, None])
    return -likely[:, 0]
