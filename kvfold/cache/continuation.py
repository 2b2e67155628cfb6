# SPDX-License-Identifier: Apache-2.0
"""Prompts and masks that may follow the columns that a cache has read."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kvfold.attention.padding import ColumnsRead, Padding
from kvfold.cache.history import Difference
from kvfold.cache.parts import CacheParts
from kvfold.errors import KvfoldError
from kvfold.hf.stock_layers import has_recurrent
from kvfold.hf.template_arguments import date_told
from kvfold.store.ragged import RaggedStore


def columns_read(cache: CacheParts) -> ColumnsRead | None:
    """The columns that a cache has read; None before the first."""
    seen, tokens = cache.get_seq_length(), cache.tokens_read()
    if seen == 0:
        return None
    if tokens is None:
        device = cache.states[0].stored().keys.device
        tokens = torch.ones(cache.rows, seen, dtype=torch.bool, device=device)
    return ColumnsRead(tokens, max(state.evicted_at for state in cache.states))


def padding_rules(cache: CacheParts, new: int) -> Padding:
    """Rules for the padding of the next `new` columns of a cache."""
    others, read = cache.other_layers().values(), partial(columns_read, cache)
    recurrent, uneven = has_recurrent(others), partial(has_uneven_heads, cache)
    columns, frozen = cache.get_seq_length() + new, cache.phase.frozen
    name, slides = cache.binding.name, bool(others)
    return Padding(name, new, columns, slides, recurrent, read, uneven, frozen)


def has_uneven_heads(cache: CacheParts) -> bool:
    """True if heads of a layer keep different numbers of entries, or may."""
    return any(isinstance(state.store, RaggedStore) for state in cache.states)


def check_mask(cache: CacheParts, mask: Tensor, new: int) -> None:
    """Raises KvfoldError for a caller's mask of `new` columns that a cache cannot follow.

    `[B, N]` as `Padding.check_width`, `[B, Hq or 1, S, N]` as `Padding.check_whole`, too.
    """
    rules = padding_rules(cache, new)
    rules.check_width(mask)
    if mask.dim() == 4:
        rules.check_whole(mask)


def parting(cache: CacheParts, ids: Tensor, mask: Tensor | None) -> Difference | None:
    """Where a prompt `ids [B, N]` first differs from what the cache has read, None: nowhere.

    `mask [B, N]` is 0 at padding, None without any. Raises KvfoldError for other rows than the
    cache's, UnsupportedModel as `ModelBinding.check_answered`.
    """
    cache.binding.check_answered()
    if cache.rows != len(ids):
        raise KvfoldError(
            f"the cache holds {cache.rows} rows and the prompt has {len(ids)}: use a new cache, or "
            "cache.batch_select_indices for the rows that go on"
        )
    read = columns_read(cache)
    assert read is not None
    return cache.phase.history.parts_from(ids, torch.ones_like(ids) if mask is None else mask, read)


def check_prompt(cache: CacheParts, ids: Tensor | None, mask: Tensor | None, total: int) -> None:
    """Raises KvfoldError unless a prompt of `total` columns begins with what the cache has read.

    Raises as `parting`, too; `ids` may be None for embeddings, which are not compared.
    """
    separator = None if ids is None else parting(cache, ids, mask)
    if separator is not None and separator.masked:
        read = columns_read(cache)
        assert read is not None
        raise KvfoldError(read.contradiction(separator.row, separator.column))
    if separator is not None:
        column = separator.column
        where = f"row {separator.row}, column {column}" if cache.rows > 1 else column
        raise KvfoldError(
            f"the cache has read another text: it differs from the prompt at {where}. Use a new "
            'cache, or kvfold.generate(reuse="prefix"), which goes back to where they part if '
            f"nothing was evicted{date_told(cache.binding.tokenizer)}"
        )
    seen = cache.get_seq_length()
    if seen >= total:
        raise KvfoldError(
            f"the cache has seen {seen} tokens and the prompt has {total}: pass the whole "
            "conversation, with at least one new token"
        )


def check_plain_prompt(
    cache: CacheParts, ids: Tensor | None, mask: Tensor | None, total: int
) -> None:
    """As `check_prompt` for a turn of the model's own `generate`, and as `check_model`.

    It may be of one token, which by itself looks like a step.
    """
    if cache.get_seq_length() and not cache.binding.in_turn:
        cache.binding.check_model()
    check_prompt(cache, ids, mask, total)
