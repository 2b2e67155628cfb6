# SPDX-License-Identifier: Apache-2.0
"""Going on with a cache that has read something: from that, or from the prefix they share."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from kvfold.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.history import History

# What to do with a cache that has read another text.
Reuse = Literal["prefix"]


def go_on_from(
    cache: CompressedCache, input_ids: Tensor, mask: Tensor, reuse: Reuse | None = None
) -> None:
    """Checks that `input_ids [B, N]` begin with what the cache has read, and go on from there.

    `mask [B, N]` is 0 at padding. With `reuse="prefix"` the cache goes back to the prefix they
    share, or starts anew where they share none, or where the method's own forwards read more.
    Raises KvfoldError as `generate` does; the cache is then as it was.
    """
    if reuse not in (None, "prefix"):
        raise KvfoldError(f'reuse is "prefix" or left out, not {reuse!r}')
    total, seen = input_ids.shape[1], cache.get_seq_length()
    if seen == 0:
        return
    cache.owner.check_answered()
    rows = cache.rows
    if rows != len(input_ids):
        raise KvfoldError(
            f"the cache holds {rows} rows and the prompt has {len(input_ids)}: use a new cache, or "
            "cache.batch_select_indices for the rows that go on"
        )
    parting = cache.history.parts_from(input_ids, mask, cache.tokens_read(), seen)
    if reuse == "prefix":
        shared = min(seen, total - 1, seen if parting is None else parting.column)
        if shared == 0 or (shared < seen and _reads_by_itself(cache)):
            _start_anew(cache)
        else:
            cache.crop(shared - seen)
    elif parting is not None:
        where = f"row {parting.row}, column {parting.column}" if rows > 1 else parting.column
        raise KvfoldError(
            f"the cache has read another text: it differs from the prompt at {where}. Use a new "
            'cache, or reuse="prefix", which goes back to where they part if nothing was evicted'
        )
    elif seen >= total:
        raise KvfoldError(
            f"the cache has seen {seen} tokens and the prompt has {total}: pass the whole "
            "conversation, with at least one new token"
        )


def _reads_by_itself(cache: CompressedCache) -> bool:
    """Whether the method's own forwards are over a first prompt, and only over that."""
    stages = cache.method.stages()
    return stages.funnel is not None or stages.needs.rebuilding is not None


def _start_anew(cache: CompressedCache) -> None:
    """Forgets everything; raises KvfoldError inside a block that promises to keep what there is."""
    if cache.turn.frozen or cache.turn.reading:
        raise KvfoldError(
            "the cache cannot start anew inside `with cache.frozen():` or `cache.reading():`"
        )
    cache.reset()


class IdsRead:
    """A logits processor that changes nothing: after each forward it is given the ids read."""

    def __init__(self, cache: CompressedCache) -> None:
        self.cache = cache

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.cache.history = History(input_ids)
        return scores
