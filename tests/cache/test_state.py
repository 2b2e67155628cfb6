# SPDX-License-Identifier: Apache-2.0
"""Numbers of kept entries (scores, moves) go with their entries, whatever a cache does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvfold
from kvfold.cache.fork import fork
from kvfold.cache.state import LayerState
from tests.helpers.caches import ALONE, BATCHES, PADDED, decode, start
from tests.helpers.compiled import COMPILED, GREEDY
from tests.helpers.contexts import compressed as context_of
from tests.helpers.contexts import new_model
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer

APPENDING = ["snapkv:window=8", "adakv:window=8", "h2o:decode=append"]
EVICTING = ["h2o", "d2o", "tova", "snapkv:window=8 + every:interval=3"]
EVICTING += ["adakv:window=8 + every:interval=3"]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", torch.float64)


def number(state: LayerState) -> Tensor:
    """A number of each stored entry `[B, H, T]` that no other of its row has; −1 for holes."""
    columns, heads = state.columns(), state.stored().keys.shape[1]
    own = columns * heads + torch.arange(heads)[:, None]
    return own.masked_fill(columns < 0, -1)


def give_numbers(cache: kvfold.CompressedCache) -> None:
    for state in cache.states:
        own = number(state)
        state.observers.kept.set(own.float().masked_fill(own < 0, torch.nan))
        state.observers.moves.set((own + 1).int())


def assert_numbered(cache: kvfold.CompressedCache, seen: int) -> int:
    """Entries of the first `seen` columns have their numbers, later ones none; how many have."""
    found = 0
    for state in cache.states:
        columns = state.columns()
        expected = number(state).masked_fill(columns >= seen, -1)[columns >= 0]
        room = columns.shape[-1]
        widened = {
            name: F.pad(numbers, (0, room - numbers.shape[-1]), value=empty)
            for name, (numbers, empty) in state.observers.numbers().items()
        }
        scores, moves = (widened[name][columns >= 0] for name in ("scores", "moves"))
        assert torch.equal(scores.nan_to_num(-1).long(), expected)
        assert torch.equal(moves.long() - 1, expected)
        found += int((expected >= 0).sum())
    return found


def test_nothing_is_numbered_unless_asked_for(model):
    reader = start(model, "h2o")
    decode(reader)
    for state in reader.cache.states:
        assert (state.observers.kept.scores, state.observers.moves.moves) == (None, None)


@pytest.mark.cases(4)
@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("spec", [*APPENDING, *EVICTING])
def test_numbers_follow_decoding_and_the_next_prefill(model, spec, lengths):
    reader = start(model, spec, lengths)
    give_numbers(reader.cache)
    seen = reader.cache.get_seq_length()
    before = assert_numbered(reader.cache, seen)
    decode(reader, steps=40 if spec == "h2o" else 8)  # as many holes as a copy drops
    evicted = assert_numbered(reader.cache, seen)
    assert evicted == before if spec in APPENDING else evicted < before
    reader(continuation(len(lengths), 12))
    assert assert_numbered(reader.cache, seen) < before


@pytest.mark.parametrize("spec", [*APPENDING, "kivi:group=8,residual=8"])
def test_numbers_follow_rows_and_crops(model, spec):
    cache = start(model, spec, PADDED).cache
    give_numbers(cache)
    seen = cache.get_seq_length()
    with cache.frozen():
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([5, 0, 2]))
        cache.batch_select_indices(torch.tensor([0, 2]))
    assert assert_numbered(cache, seen)


def test_numbers_follow_a_crop(model):
    reader = start(model, "snapkv:window=8")
    seen = reader.cache.get_seq_length()
    decode(reader, steps=4)
    give_numbers(reader.cache)
    reader.cache.crop(-3)
    assert assert_numbered(reader.cache, seen + 1)


@pytest.mark.parametrize("spec", ["snapkv", "adakv"])
def test_numbers_are_saved_and_loaded(tmp_path, spec):
    model, tokenizer = new_model(), word_tokenizer()
    context = context_of(model, tokenizer, spec)
    give_numbers(context.cache)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    assert assert_numbered(loaded.cache, loaded.cache.get_seq_length())


def test_a_fork_has_no_numbers_and_leaves_its_source_alone(model):
    cache = start(model, "snapkv:window=8").cache
    give_numbers(cache)
    reader = fork(cache)
    assert all(state.observers.kept.scores is None for state in reader.states)
    assert assert_numbered(cache, cache.get_seq_length())


@pytest.mark.slow
def test_numbers_follow_compiled_decoding():
    model = build("llama")
    reader = start(model, "h2o", ALONE)
    give_numbers(reader.cache)
    seen = reader.cache.get_seq_length()
    before = assert_numbered(reader.cache, seen)
    text = torch.cat([prompts(ALONE)[0], continuation(1, 1)], 1)
    options = {**GREEDY, **COMPILED, "max_new_tokens": 40}
    kvfold.generate(
        model, text, cache=reader.cache, attention_mask=torch.ones_like(text), **options
    )
    assert 0 < assert_numbered(reader.cache, seen) < before
