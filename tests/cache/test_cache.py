# SPDX-License-Identifier: Apache-2.0
"""A cache that is reset, saved, frozen or cropped, and what it refuses to take back."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

import kvfold
from kvfold import CompressedCache, KvfoldError
from kvfold.generation.reading import read_turn
from tests.helpers.budgets import (
    compressed,
    moves,
)
from tests.helpers.caches import (
    ALONE,
    PADDED,
    STATEFUL,
    ask,
    bits,
    counted_bytes,
    decode,
    positions,
    reachable_bytes,
    same,
    start,
)
from tests.helpers.models import build, continuation, prompts
from tests.helpers.truth import Reader, worst


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices"])
@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("spec", ["roco:decode=append + adakv", "h2o:decode=append + adakv"])
def test_column_sums_of_heads_of_their_own_length_follow_their_rows(model, spec, change, row):
    """Where the row with the longest head is dropped, all others' heads become shorter ones."""
    ids, mask = prompts(PADDED)
    steps = continuation(2, 4).split(1, 1)
    reader = start(model, spec, PADDED)
    straight = Reader(model, compressed(model, spec), mask[[row, row]])
    straight(ids[[row, row]])
    getattr(reader.cache, change)(torch.tensor([row, row]))
    reader.mask = reader.mask[[row, row]]
    for piece in (*steps, continuation(2, 9, seed=5)):
        torch.testing.assert_close(reader(piece), straight(piece), atol=1e-6, rtol=0)
    assert positions(reader.cache) == positions(straight.cache)
    assert counted_bytes(reader.cache) == reachable_bytes(reader.cache)


def test_a_reset_cache_is_as_new(model):
    reader = start(model, "h2o", PADDED)
    expected = decode(start(model, "h2o"))
    reader.cache.reset()
    again = Reader(model, reader.cache)
    again(prompts(ALONE)[0])
    assert same(decode(again), expected)


@pytest.mark.slow
@pytest.mark.parametrize("reset", [DynamicSlidingWindowLayer.reset, CacheLayerMixin.reset])
def test_a_reset_cache_with_sliding_windows_is_as_new(monkeypatch, reset):
    """Before transformers 5.18 windows had the second `reset`, which keeps zeros."""
    monkeypatch.setattr(DynamicSlidingWindowLayer, "reset", reset)
    sliding = build("gemma2", torch.float64)
    reader = start(sliding, "h2o", PADDED)
    reader.cache.reset()
    again = Reader(sliding, reader.cache)
    again(prompts(ALONE)[0])
    assert same(decode(again), decode(start(sliding, "h2o")))


@pytest.mark.parametrize("spec", [spec for spec in STATEFUL if not moves(spec)])
def test_a_saved_cache_continues_like_the_original(model, spec):
    reader = start(model, spec, PADDED)
    file = io.BytesIO()
    torch.save(reader.cache, file)
    file.seek(0)
    second = Reader(model, torch.load(file, weights_only=False), reader.mask)
    second.started = True
    assert same(decode(second), decode(reader))
    assert positions(second.cache) == positions(reader.cache)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "deepseek_v3", "llama4"])
def test_questions_leave_a_frozen_cache_as_it_was_in_unusual_families(name):
    model = build(name, torch.float64)
    reader, untouched = (start(model, "snapkv:window=8", PADDED) for _ in range(2))
    first = ask(reader, seed=1)
    assert torch.equal(ask(reader, seed=1), first)
    assert same(decode(reader), decode(untouched))
    assert positions(reader.cache) == positions(untouched.cache)


def test_questions_leave_a_frozen_hybrid_cache_as_it_was_or_are_refused():
    model = build("qwen3_5", torch.float64)
    reader, untouched = (start(model, "snapkv:window=8") for _ in range(2))
    try:
        first = ask(reader, seed=1)
    except kvfold.KvfoldError:
        return
    assert torch.equal(ask(reader, seed=1), first)
    assert same(decode(reader), decode(untouched))


def test_after_a_frozen_block_sliding_layers_slide_again():
    model = build("gemma3")
    reader = start(model, "snapkv:window=8")
    ask(reader, seed=1)
    decode(reader, 20)
    assert reader.cache.layers[0].keys.shape[2] == 15  # window 16: this token and 15 before it


@pytest.mark.slow
def test_rows_that_change_places_in_a_frozen_block_do_so_where_it_began():
    model = build("gemma3")
    ids, said = prompts((64, 64))[0], []
    for inside in (False, True):
        reader = Reader(model, CompressedCache(model, "snapkv:window=8", 30))
        reader(ids)
        if not inside:
            reader.cache.reorder_cache(torch.tensor([1, 0]))
        with reader.cache.frozen():
            reader(continuation(2, 5))
            if inside:
                reader.cache.reorder_cache(torch.tensor([1, 0]))
            reader.cache.crop(-5)
        said.append(reader(continuation(2, 4, seed=3)))
    torch.testing.assert_close(said[0], said[1])


def test_taking_back_evicted_tokens_is_refused_and_changes_nothing(model):
    for spec in ("snapkv:window=8", "knorm:skip_layers=0", "pyramidkv:window=8"):
        reader = start(model, spec, budget=30)
        before, where = bits(reader.cache), positions(reader.cache)
        with pytest.raises(kvfold.KvfoldError, match="evicted"):
            reader.cache.crop(-30)
        assert reader.cache.get_seq_length() == 64
        assert [layer.get_seq_length() for layer in reader.cache.layers] == [64] * 4
        assert positions(reader.cache) == where and same(bits(reader.cache), before)


def test_evicted_tokens_are_not_taken_back(model):
    cache = CompressedCache(model, "snapkv:window=8", 20)
    Reader(model, cache)(prompts((64,))[0])
    with pytest.raises(KvfoldError, match="frozen"):
        cache.crop(-40)
    with pytest.raises(KvfoldError, match="minus"):
        cache.crop(40)
    with pytest.raises(KvfoldError, match="cannot drop 65 tokens of 64"):
        cache.crop(-65)
    with pytest.raises(KvfoldError, match="cannot drop 1 tokens of 0"):
        CompressedCache(model, "snapkv:window=8", 20).crop(-1)


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True], ids=["evicting", "frozen"])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "cohere2", "llama4", "qwen3_5"])
def test_tokens_that_other_layers_let_go_of_are_not_taken_back(name, frozen):
    model = build(name)
    readers = [Reader(model, CompressedCache(model, "snapkv:window=8", 1.0)) for _ in range(2)]
    for reader in readers:
        reader(prompts((64,))[0])
    cropped, untouched = (reader.cache for reader in readers)
    with cropped.frozen() if frozen else contextlib.nullcontext():
        for reader in readers:
            reader(continuation(1, 3))
        with pytest.raises(KvfoldError, match="let go of older tokens"):
            cropped.crop(-2)
        cropped.crop(0)
    assert cropped.stats().kept == untouched.stats().kept
    assert torch.equal(readers[0](continuation(1, 1)), readers[1](continuation(1, 1)))


def test_a_sliding_window_that_has_not_slid_is_cropped():
    model = build("gemma3")
    ids = prompts((12,))[0]
    reader, alone = (Reader(model, CompressedCache(model, "knorm", 1.0)) for _ in range(2))
    reader(ids)
    reader.cache.crop(-5)
    alone(ids[:, :-5])
    expected, got = (r(continuation(1, 1)) for r in (alone, reader))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("index", [0, 1, 3])
def test_layers_of_unequal_length_are_noticed_before_anything_is_stored(index):
    model = build("gemma3")
    cache = CompressedCache(model, "knorm", 1.0)
    Reader(model, cache)(prompts((12,))[0])
    cache.layers[index].crop(-2)
    lengths = [layer.get_seq_length() for layer in cache.layers]
    with pytest.raises(KvfoldError, match="10 to 12 tokens"):
        Reader(model, cache)(continuation(1, 1))
    assert [layer.get_seq_length() for layer in cache.layers] == lengths


@pytest.mark.parametrize("spec", ["tova", "snapkv:window=8", "tova + recent"])
def test_a_row_goes_on_without_the_padded_one_beside_it(model, spec):
    ids, mask = prompts((36, 20))
    cache, alone = (compressed(model, spec) for _ in range(2))
    reader, own = Reader(model, cache, mask), Reader(model, alone)
    reader(ids)
    own(ids[:1])
    cache.batch_select_indices(torch.tensor([0]))
    reader.mask = torch.ones(1, 36, dtype=torch.long)
    for token in continuation(1, 3).split(1, 1):
        assert worst(reader(token), own(token)) < 1e-9


@pytest.mark.parametrize("rows", [torch.tensor([0, 2]), torch.tensor([True, False, True])])
def test_rows_are_selected_by_number_or_mask_and_none_of_an_empty_cache(model, rows):
    ids, mask = prompts(PADDED)
    cache, other = (compressed(model, "snapkv:window=8") for _ in range(2))
    for each in (cache, other):
        each.batch_select_indices(rows)
        assert each.rows == each.get_seq_length() == 0
    Reader(model, cache, mask)(ids)
    Reader(model, other, mask[[0, 2]])(ids[[0, 2]])
    cache.batch_select_indices(rows)
    assert positions(cache) == positions(other)


def test_layers_that_share_entries_are_cropped_with_the_others():
    model, ids = build("gemma3n"), prompts((12,))[0]
    cache, straight = (kvfold.CompressedCache(model, "full") for _ in range(2))
    reader = Reader(model, cache)
    reader(ids[:, :9])
    cache.crop(-2)
    assert worst(Reader(model, cache)(ids[:, 7:]), Reader(model, straight)(ids)[:, 7:]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["jamba", "bamba", "qwen3_5"])
def test_rows_of_recurrent_layers_are_repeated_and_selected(family):
    model, ids = build(family), torch.cat([prompts((30,), seed=n)[0] for n in range(2)])
    cache = kvfold.CompressedCache(model, "snapkv:window=8", 0.5)
    options = {"num_beams": 2, "do_sample": False, "max_new_tokens": 3}
    beams = kvfold.generate(model, ids, cache=cache, prefill_chunk=8, **options)
    fresh = kvfold.CompressedCache(model, "snapkv:window=8", 0.5)
    assert torch.equal(beams, kvfold.generate(model, ids, cache=fresh, **options))
    both, one = (kvfold.CompressedCache(model, "full") for _ in range(2))
    read_turn(model, both, ids, None, 30, 30)
    both.batch_select_indices(torch.tensor([1]))
    read_turn(model, one, ids[1:], None, 30, 30)
    token = torch.tensor([[7]])
    assert worst(Reader(model, both)(token), Reader(model, one)(token)) < 1e-4
