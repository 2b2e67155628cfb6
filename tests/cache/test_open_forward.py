# SPDX-License-Identifier: Apache-2.0
"""Forwards that failed: what was stored is not read twice, nor read on."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold import BudgetError, CompressedCache, KvfoldError, UnsupportedModel
from kvfold.cache.fork import fork
from tests.helpers.models import broken, build, continuation, prompts
from tests.helpers.truth import Reader, stock_cache


@pytest.fixture
def model():
    return build("llama")


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_failed_forward_leaves_no_mark_on_other_caches(name):
    model = build(name)
    ids, token = prompts((20,))[0], continuation(1, 1)
    clean = Reader(model, stock_cache(model))
    expected = [clean(ids), clean(token)]
    broken = CompressedCache(model, "knorm", 20)
    Reader(model, broken)(prompts((64,))[0])
    latest = broken.layers[0].keys[:, :, -1:], broken.layers[0].values[:, :, -1:]
    broken.update(*latest, 0)  # and then something went wrong: its attention never came
    before = broken.stats()
    again = Reader(model, stock_cache(model))
    assert torch.equal(again(ids), expected[0]) and torch.equal(again(token), expected[1])
    assert broken.stats() == before
    with pytest.raises(UnsupportedModel, match="make a new cache"):
        Reader(model, broken)(token)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("part", ["embed_tokens", "norm", "lm_head"])
def test_a_forward_that_failed_is_not_read_twice(part, steps):
    """Behind the last layer its tokens are stored: they are taken back, or nothing goes on."""
    model = build("llama", torch.float64)
    ids, tokens = prompts((12,))[0], continuation(1, 4).split(1, 1)
    reader, untouched = (Reader(model, CompressedCache(model, "full")) for _ in range(2))
    for piece in (ids, *tokens[:steps]):
        reader(piece), untouched(piece)
    handle = broken(dict(model.named_modules())[part if part == "lm_head" else f"model.{part}"])
    with pytest.raises(RuntimeError, match="broken"):
        reader(tokens[2])
    handle.remove()
    if part != "embed_tokens":
        for _ in range(2):
            with pytest.raises(KvfoldError, match=r"stored its 1 tokens: .*crop\(-1\)"):
                reader(tokens[2])
        reader.cache.crop(-1)
    for token in tokens[2:]:
        assert torch.equal(reader(token), untouched(token))
    assert reader.cache.stats() == untouched.cache.stats()


def test_recurrent_states_of_a_forward_that_failed_are_not_read_on():
    """Before the first layer of attention nothing tells by its length that states moved on."""
    model = build("qwen3_5", torch.float64)
    ids, tokens = prompts((12,))[0], continuation(1, 4).split(1, 1)
    reader, untouched = (Reader(model, CompressedCache(model, "full")) for _ in range(2))
    reader(ids), untouched(ids)
    handle = broken(model.model.layers[1])
    with reader.cache.frozen():
        with pytest.raises(RuntimeError, match="broken"):
            reader(tokens[0])
        reader.cache.crop(0)  # back to where the block began
    handle.remove()
    assert torch.equal(reader(tokens[0]), untouched(tokens[0]))
    handle = broken(model.model.layers[0])
    with pytest.raises(RuntimeError, match="broken"):
        reader(tokens[1])
    handle.remove()
    assert torch.equal(reader(tokens[1]), untouched(tokens[1]))  # no state had moved on yet
    handle = broken(model.model.layers[1])
    with pytest.raises(RuntimeError, match="broken"):
        reader(tokens[2])
    handle.remove()
    for cache in (reader.cache, fork(reader.cache)):
        for _ in range(2):
            with pytest.raises(KvfoldError, match=r"recurrent layers.*make a new cache"):
                Reader(model, cache)(tokens[2])
    reader.cache.reset()
    again = Reader(model, CompressedCache(model, "full"))
    assert torch.equal(reader(ids), again(ids))


def test_a_forward_that_failed_when_it_had_evicted_cannot_be_taken_back(model):
    reader = Reader(model, CompressedCache(model, "snapkv:window=8", 20))
    handle = broken(model.lm_head)
    with pytest.raises(RuntimeError, match="broken"):
        reader(prompts((64,))[0])
    handle.remove()
    with pytest.raises(KvfoldError, match="stored its 64 tokens"):
        reader(continuation(1, 1))
    with pytest.raises(KvfoldError, match="evicted"):
        reader.cache.crop(-64)
    reader.cache.reset()
    reader(prompts((64,))[0])


def test_forwards_are_watched_once_and_no_longer_when_disabled():
    model = build("llama")
    CompressedCache(model, "knorm", 20)
    once = [*model._forward_pre_hooks], [*model._forward_hooks]
    assert all(once)
    CompressedCache(model, "knorm", 20)
    assert ([*model._forward_pre_hooks], [*model._forward_hooks]) == once
    kvfold.disable(model)
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_after_an_error_while_reading_nothing_is_compressed(model):
    cache = CompressedCache(model, "snapkv:window=8", 20)
    with pytest.raises(RuntimeError, match="interrupted"), cache.reading():
        Reader(model, cache)(prompts((64,))[0])
        raise RuntimeError("interrupted")
    assert cache.stats().kept == [[[64, 64]]] * 4


def test_after_an_error_in_the_middle_of_a_forward_the_cache_is_refused(model):
    cache = CompressedCache(model, "knorm:skip_layers=0/1", 0.2)
    reader = Reader(model, cache)
    with pytest.raises(BudgetError):
        reader(prompts((64,))[0])
    with pytest.raises(UnsupportedModel, match="last forward failed"):
        reader(continuation(1, 1))


def test_a_forward_that_stores_nothing_is_refused(model):
    """Under gradient checkpointing transformers reads on without a cache."""
    ids, cache = prompts((64,))[0], CompressedCache(model, "knorm", 20)
    model.gradient_checkpointing_enable()
    with pytest.raises(UnsupportedModel, match=r"stored none of them.*model\.eval\(\)"):
        model.train()(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0
    model.eval()(ids, past_key_values=cache)
    assert cache.get_seq_length() == 64
