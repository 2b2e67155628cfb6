# SPDX-License-Identifier: Apache-2.0
"""Usage of each row of a padded batch, against that of the row alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.cache.fork import fork
from kvfold.eval.run.outcome import cache_usage
from kvfold.store.buffer import slack
from kvfold.store.ragged_part import ROOM
from tests.helpers.models import build, prompts
from tests.helpers.tokenizers import word_tokenizer

LENGTHS = (1300, 120, 613, 290)
LAYERS, HEADS, SIZE = 4, 2, 64
EVERY = [
    ("full", None),
    ("knorm", "0.2"),
    ("snapkv", "0.5"),
    ("snapkv", "200"),  # the shortest row loses nothing
    ("h2o", "0.5"),
    ("d2o", "0.5"),
    ("streaming_llm", "0.2"),
    ("adakv", "0.5"),
    ("kvzip", "0.3"),
    ("kivi", None),
    ("snapkv + kivi", "0.5"),
    ("adakv + kivi", "0.5"),
    ("turboquant", None),
    ("snapkv + turboquant", "0.5"),
    ("minicache", None),
    ("think", None),
    ("snapkv + match", "0.5"),
    ("adakv + match", "0.5"),
]
METHODS = pytest.mark.parametrize(("spec", "budget"), EVERY)


def filled(rows: list[Tensor], spec: str, budget: str | None, new: int) -> kvfold.CompressedCache:
    """A cache that has read the rows, padded on the left, and `new` − 1 generated tokens."""
    model, longest = build("llama", head_dim=SIZE), max(row.shape[1] for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for into, seen, row in zip(ids, mask, rows, strict=True):
        into[longest - row.shape[1] :], seen[longest - row.shape[1] :] = row[0], 1
    limit = None if budget is None else kvfold.Budget.of(budget).for_each(len(rows))
    cache = kvfold.CompressedCache(model, spec, limit, tokenizer=word_tokenizer())
    asked = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
    kvfold.generate(model, ids, cache=cache, attention_mask=mask, **asked)
    return cache


def texts() -> list[Tensor]:
    return [prompts((n,), seed=n)[0] for n in LENGTHS]


@pytest.mark.cases(1)
@pytest.mark.slow
@METHODS
def test_rows_are_counted_as_if_alone(spec: str, budget: str | None) -> None:
    together = cache_usage(filled(texts(), spec, budget, 1))
    for ours, row in zip(together, texts(), strict=True):
        (alone,) = cache_usage(filled([row], spec, budget, 1))
        assert (ours.seen, ours.nbytes_full) == (alone.seen, alone.nbytes_full)
        assert ours.kept == pytest.approx(alone.kept, abs=1e-9)
        assert ours.nbytes == alone.nbytes


@pytest.mark.whole
@METHODS
def test_decode_steps_add_their_entries_to_each_row(spec: str, budget: str | None) -> None:
    together = cache_usage(filled(texts(), spec, budget, 30))
    for ours, row in zip(together, texts(), strict=True):
        (alone,) = cache_usage(filled([row], spec, budget, 30))
        # A buffer that grew has between none and its usual number of free slots, as it happens.
        slots = max(slack(row.shape[1] + 30), ROOM)
        free = slots * LAYERS * HEADS * (2 * SIZE + 4) * 4
        assert ours.nbytes == pytest.approx(alone.nbytes, abs=free)


@pytest.mark.slow
@pytest.mark.cases(1)
@METHODS
def test_equal_rows_and_forks_share_all_bytes_equally(spec: str, budget: str | None) -> None:
    row = texts()[2]
    for rows in ([row], [row] * 3):
        cache = filled(rows, spec, budget, 3)
        for each in (cache, fork(cache)):
            usage = [row.nbytes for row in cache_usage(each)]
            assert usage == [each.stats().nbytes // len(rows)] * len(rows)
