# SPDX-License-Identifier: Apache-2.0
"""What a cache has read: token ids, and which of its columns are tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.attention.padding import ColumnsRead, Padding
from kvfold.errors import KvfoldError
from kvfold.hf.stock_layers import has_recurrent
from kvfold.hf.template_arguments import date_told
from kvfold.store.ragged import RaggedStore

if TYPE_CHECKING:
    from kvfold.cache.cache import CompressedCache

PARTS = 64  # newer tokens after which all parts are joined


@dataclass(frozen=True)
class Difference:
    """The first column at which a prompt differs from the tokens read, and its row.

    `masked`: the ids are the same there, but only one of the two is padding.
    """

    row: int
    column: int
    masked: bool


@dataclass(frozen=True)
class History:
    """Ids `[B, n]` of the first `n` columns read, padding included: `ids`, then `newer` tokens.

    Columns from `n` on were read by forwards that had no ids (`inputs_embeds`), or went past the
    model that the cache was made for: they cannot be compared.
    """

    ids: Tensor | None = None
    newer: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        """Number of columns whose ids are known."""
        return len(self.newer) + (0 if self.ids is None else self.ids.shape[1])

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.newer if self.ids is None else (self.ids, *self.newer)

    def whole(self) -> Tensor | None:
        """All ids `[B, n]`, int32 in host memory; None if none are known."""
        parts = [part.to("cpu", torch.int32) for part in self._parts]
        return torch.cat(parts, 1) if parts else None

    def complete(self, seen: int) -> Tensor | None:
        """All ids `[B, seen]` as `whole`; None unless those of all `seen` columns are known."""
        return self.whole() if len(self) == seen else None

    def plus(self, ids: Tensor, start: int) -> History:
        """History with `ids [B, S]` of columns from `start` on, if all columns before are known."""
        if len(self) != start or (start and len(self._parts[-1]) != len(ids)):
            return self
        longer = History(self.ids, (*self.newer, ids.to(torch.int32, copy=True)))
        # Joining waits for a GPU, so it happens at prompts and every PARTS tokens only.
        return longer.compact() if ids.shape[1] > 1 or len(longer.newer) == PARTS else longer

    def compact(self) -> History:
        """History in one tensor of its own, 4 bytes a token in host memory."""
        return History(self.whole())

    def crop(self, length: int) -> History:
        """The history of the first `length` columns."""
        if len(self) <= length:
            return self
        ids = self.whole()
        assert ids is not None
        return History(ids[:, :length].clone())

    def index(self, rows: Callable[[Tensor], Tensor]) -> History:
        """Applies `rows`, a selection along the batch axis."""
        ids = None if self.ids is None else rows(self.ids)
        return History(ids, tuple(rows(part) for part in self.newer))

    def parts_from(self, input_ids: Tensor, mask: Tensor, read: ColumnsRead) -> Difference | None:
        """First difference of `input_ids [B, N]` from the columns `read`; None: no difference.

        `mask [B, N]` is 0 at padding, whose ids are not compared.
        """
        given = mask.to("cpu") != 0
        masked = read.contradicted(given).to("cpu")
        unlike = torch.zeros_like(masked)
        ids = self.whole()
        if ids is not None:
            known = min(masked.shape[1], ids.shape[1])
            other = ids[:, :known] != input_ids[:, :known].to("cpu")
            unlike[:, :known] = other & given[:, :known]
        differs = masked | unlike
        if not bool(differs.any()):
            return None
        column = int(differs.any(0).int().argmax())
        row = int(differs[:, column].int().argmax())
        return Difference(row, column, not unlike[row, column])

    @property
    def nbytes(self) -> int:
        """Bytes of the ids."""
        return sum(part.numel() * part.element_size() for part in self._parts)


def columns_read(cache: CompressedCache) -> ColumnsRead | None:
    """The columns that a cache has read; None before the first."""
    seen, tokens = cache.get_seq_length(), cache.tokens_read()
    if seen == 0:
        return None
    if tokens is None:
        device = cache.states[0].stored().keys.device
        tokens = torch.ones(cache.rows, seen, dtype=torch.bool, device=device)
    return ColumnsRead(tokens, max(state.evicted_at for state in cache.states))


def padding_rules(cache: CompressedCache, new: int) -> Padding:
    """Rules for the padding of the next `new` columns of a cache."""
    others, read = cache.other_layers().values(), partial(columns_read, cache)
    recurrent, uneven = has_recurrent(others), partial(has_uneven_heads, cache)
    columns, frozen = cache.get_seq_length() + new, cache.phase.frozen
    name, slides = cache.binding.name, bool(others)
    return Padding(name, new, columns, slides, recurrent, read, uneven, frozen)


def has_uneven_heads(cache: CompressedCache) -> bool:
    """True if heads of a layer keep different numbers of entries, or may."""
    return any(isinstance(state.store, RaggedStore) for state in cache.states)


def check_mask(cache: CompressedCache, mask: Tensor | None, new: int) -> None:
    """Raises KvfoldError for a caller's mask of `new` columns that a cache cannot follow.

    `[B, N]` as `Padding.check_width`, `[B, Hq or 1, S, N]` as `Padding.check_whole`, too.
    """
    if mask is None:
        return
    rules = padding_rules(cache, new)
    rules.check_width(mask)
    if mask.dim() == 4:
        rules.check_whole(mask)


def parting(cache: CompressedCache, ids: Tensor, mask: Tensor | None) -> Difference | None:
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


def check_prompt(
    cache: CompressedCache, ids: Tensor | None, mask: Tensor | None, total: int
) -> None:
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
