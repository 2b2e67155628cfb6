# SPDX-License-Identifier: Apache-2.0
"""How likely a model finds a text, when what it remembers of it is compressed."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache


@torch.no_grad()
def token_by_token(model: PreTrainedModel, cache: CompressedCache, ids: Tensor) -> Tensor:
    """−log p of each of `ids [1, S]` but the first, in nats `[S − 1]`.

    The cache evicts after every token, as it would while decoding (StreamingLLM, arXiv 2309.17453,
    `examples/eval_long_ppl.py`); one forward over the whole text would evict nothing.
    """
    found = []
    for index in range(ids.shape[1] - 1):
        out = model(input_ids=ids[:, index : index + 1], past_key_values=cache, use_cache=True)
        found.append(_nll(out.logits, ids[:, index + 1 : index + 2]))
    return torch.cat(found)


@torch.no_grad()
def at_once(model: PreTrainedModel, cache: CompressedCache, ids: Tensor) -> Tensor:
    """−log p of each of `ids [1, S]` but the first after what the cache holds `[S − 1]`.

    The cache must be frozen, or the text would be compressed as a turn.
    """
    out = model(input_ids=ids, past_key_values=cache, use_cache=True)
    return _nll(out.logits[:, :-1], ids[:, 1:])


def _nll(logits: Tensor, following: Tensor) -> Tensor:
    """Of the tokens `following [1, S]` after each of `logits [1, S, V]`: `[S]`."""
    likely = logits[0].float().log_softmax(-1).gather(-1, following[0, :, None])
    return -likely[:, 0]
