# SPDX-License-Identifier: Apache-2.0
"""The window of observed queries after tokens were taken back."""

from __future__ import annotations

import contextlib

import pytest
import torch

import kvfold
from tests.helpers.budgets import (
    compressed,
)
from tests.helpers.caches import (
    kept,
    positions,
    start,
)
from tests.helpers.models import build, continuation, prompts
from tests.helpers.truth import Reader


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64)


@pytest.mark.parametrize("lengths", [(40,), (40, 33)], ids=["alone", "padded"])
def test_queries_of_tokens_that_were_taken_back_decide_nothing(model, lengths):
    """A reading that broke off between two pieces, and goes on with another text."""
    ids, mask = prompts(lengths)
    cut, straight = (compressed(model, "snapkv:window=8") for _ in range(2))
    with contextlib.suppress(RuntimeError), cut.reading():
        Reader(model, cut, mask)(ids)
        raise RuntimeError("interrupted")
    cut.crop(-5)
    readers = Reader(model, cut, mask[:, :35]), Reader(model, straight, mask[:, :35])
    with cut.reading(), straight.reading():
        readers[1](ids[:, :35])
        readers[0].started = True
        for reader in readers:
            reader(continuation(len(lengths), 3))
        for mine, theirs in zip(cut.states, straight.states, strict=True):
            # Of the eight before, the five that were taken back are gone.
            expected = torch.tensor([[-1, -1, 32, 33, 34, 35, 36, 37]]).repeat(len(lengths), 1)
            assert torch.equal(mine.observers.window.prompt.columns, expected)
            of_mine, of_theirs = (
                mine.observers.window.prompt.attended,
                theirs.observers.window.prompt.attended,
            )
            torch.testing.assert_close(of_mine.query[:, :, 2:], of_theirs.query[:, :, 2:])
    assert kept(cut) == kept(straight)


def test_a_turn_whose_last_queries_were_all_taken_back_does_not_end(model):
    cache, ids = compressed(model, "snapkv:window=8"), prompts((40,))[0]
    reader = Reader(model, cache)
    with pytest.raises(kvfold.KvfoldError, match="one more token"), cache.reading():
        reader(ids)
        cache.crop(-8)
    assert kept(cache) == [32]
    with cache.reading():
        reader(ids[:, 32:])
    assert positions(cache) == positions(start(model, "snapkv:window=8", (40,)).cache)
    other = compressed(model, "snapkv:window=8")
    with other.reading():
        Reader(model, other)(ids)
        other.crop(-40)
    assert other.get_seq_length() == 0
