# SPDX-License-Identifier: Apache-2.0
"""Reading of a prompt by the model's own forwards."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.generation.pieces import forwards_of
from kvfold.hf.models import read_tokens


def read_plainly(
    model: PreTrainedModel,
    cache: CompressedCache,
    input_ids: Tensor,
    mask: Tensor | None,
    chunk: int,
) -> None:
    """Fills the cache with the unseen part of `input_ids [B, N]`, at most `chunk` tokens at a time.

    `mask [B, ≥ N]` is 0 at padding. Raises KvfoldError as `forwards_of`, before anything is read.
    """
    start = cache.get_seq_length()
    ends = forwards_of(model, cache, mask, start, input_ids.shape[1], chunk)
    for begin, end in pairwise([start, *ends]):
        covered = None if mask is None else mask[:, :end]
        padded = covered if covered is not None and bool((covered == 0).any()) else None
        read_tokens(model, input_ids[:, begin:end], cache, padded)
