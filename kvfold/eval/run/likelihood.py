# SPDX-License-Identifier: Apache-2.0
"""Negative log-likelihoods of texts under a compressed cache."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.hf.models import read_logits


@torch.no_grad()
def token_by_token(model: PreTrainedModel, cache: CompressedCache, ids: Tensor) -> Tensor:
    """−log p in nats of all tokens of `ids [B, S]` but the first, `[B, S − 1]`.

    One forward per token, so that the cache evicts after each as in decoding (StreamingLLM, arXiv
    2309.17453, `examples/eval_long_ppl.py`); one forward over the whole text would evict nothing.
    """
    found = []
    for index in range(ids.shape[1] - 1):
        logits = read_logits(model, ids[:, index : index + 1], cache, None, 1)
        found.append(_nll(logits, ids[:, index + 1 : index + 2]))
    return torch.cat(found, 1)


@torch.no_grad()
def at_once(model: PreTrainedModel, cache: CompressedCache, ids: Tensor) -> Tensor:
    """−log p in nats of all tokens of `ids [1, S]` but the first, given the cache, `[S − 1]`.

    The cache must be frozen or a fork, else the text would be compressed as a turn.
    """
    logits = read_logits(model, ids, cache, None, ids.shape[1])
    return _nll(logits[:, :-1], ids[:, 1:])[0]


def _nll(logits: Tensor, following: Tensor) -> Tensor:
    """−log p in nats `[B, S]` of the tokens `following [B, S]` under `logits [B, S, V]`."""
    likely = logits.float().log_softmax(-1).gather(-1, following[..., None])
    return -likely[..., 0]
