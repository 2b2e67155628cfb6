# SPDX-License-Identifier: Apache-2.0
"""Reading of prompts into a cache: as one prefill, inside an open one, or piece by piece.

KVzip and PyramidInfer read a first prompt by forwards of their own.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.generation import pieces
from kvfold.generation.readers.layerwise import read_layerwise
from kvfold.generation.readers.plain import read_plainly
from kvfold.generation.readers.reconstruct import read_and_reconstruct


class PromptReader(Protocol):
    """A way of reading the unseen part of `input_ids [B, N]`, in forwards of `chunk` tokens."""

    def __call__(
        self,
        model: PreTrainedModel,
        cache: CompressedCache,
        input_ids: Tensor,
        mask: Tensor | None,
        chunk: int,
    ) -> None:
        """`mask [B, ≥ N]` is 0 at padding."""


def reader_of(cache: CompressedCache) -> PromptReader:
    """The reader that the method's stages ask for, which differs for a first prompt."""
    if cache.method.stages().token_pruning is not None and cache.get_seq_length() == 0:
        return read_layerwise
    return read_plainly if cache.reconstruction is None else read_and_reconstruct


def read_turn(
    model: PreTrainedModel,
    cache: CompressedCache,
    input_ids: Tensor,
    mask: Tensor | None = None,
    until: int | None = None,
    chunk: int | None = None,
) -> None:
    """Reads the unseen part of `input_ids [B, N]`, a prefill that ends at `until` columns.

    None: at N. Forwards are of at most `chunk` tokens, None: one. A method with forwards of its own
    ends the prefill with them.
    """
    until = input_ids.shape[1] if until is None else until
    with cache.reading(until=None if cache.runs_own_forwards else until):
        read_on(model, cache, input_ids, mask, chunk)


def read_on(
    model: PreTrainedModel,
    cache: CompressedCache,
    input_ids: Tensor,
    mask: Tensor | None = None,
    chunk: int | None = None,
) -> None:
    """As `read_turn`, inside a `reading()` block that ends the prefill later."""
    reader_of(cache)(model, cache, input_ids, mask, pieces.piece_of(chunk, input_ids.shape[1]))


def read_per_chunk(
    model: PreTrainedModel,
    cache: CompressedCache,
    input_ids: Tensor,
    mask: Tensor | None = None,
    chunk: int | None = None,
) -> None:
    """Reads the unseen part of `input_ids [B, N]`, and compresses after each piece.

    Raises KvfoldError for methods that must see a prompt as a whole.
    """
    for end in piece_turns(model, cache, mask, cache.get_seq_length(), input_ids.shape[1], chunk):
        read_turn(model, cache, input_ids[:, :end], mask, end, chunk)
    cache.take(per_chunk=chunk)


def piece_turns(
    model: PreTrainedModel,
    cache: CompressedCache,
    mask: Tensor | None,
    start: int,
    stop: int,
    chunk: int | None,
) -> list[int]:
    """Ends of pieces of equal length, of at most `chunk` tokens, that are compressed each.

    Raises KvfoldError if one cannot be read, and as `check_per_chunk`.
    """
    chunk = pieces.check_per_chunk(cache.method, chunk)
    ends = pieces.behind_switch(cache, start, stop, pieces.piece_ends(start, stop, chunk))
    for begin, end in pairwise([start, *ends]):
        pieces.forwards_of(model, cache, mask, begin, end, chunk)
    return ends
