# SPDX-License-Identifier: Apache-2.0
"""Rotations that kvfold cannot repeat: keys that are not rotary, and frequencies that change."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

import kvfold
from kvfold import CompressedCache, UnsupportedModel
from kvfold.hf import models
from tests.helpers.caches import GREEDY
from tests.helpers.longrope import longrope, notices_drops
from tests.helpers.models import build, prompts


@pytest.fixture
def model():
    return build("llama")


@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3"])
def test_sinks_do_not_move_without_rotary_keys(name):
    model = build(name)
    with pytest.raises(UnsupportedModel, match='positions="original"'):
        CompressedCache(model, "streaming_llm", 20)
    CompressedCache(model, "streaming_llm_original", 20)


def test_sinks_do_not_move_where_frequencies_change_with_the_length():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = build("llama", rope_parameters=rope)
    with pytest.raises(UnsupportedModel, match='positions="original"'):
        CompressedCache(model, "streaming_llm", 20)
    CompressedCache(model, "streaming_llm_original", 20)


def test_longrope_is_refused_where_a_dropped_cache_goes_unnoticed(monkeypatch):
    monkeypatch.setattr(models, "TELLS_CACHE_FROM", Version("99"))
    with pytest.raises(UnsupportedModel, match="transformers 99"):
        CompressedCache(longrope(), "snapkv:window=8", 20)


@notices_drops
def test_longrope_is_refused_by_generate_and_works_with_ours():
    model = longrope()
    ids = prompts((64,))[0]
    cache = CompressedCache(model, "snapkv:window=8", 20)
    with pytest.raises(UnsupportedModel, match=r"kvfold\.generate"):
        model.generate(ids, past_key_values=cache, **GREEDY)
    cache = CompressedCache(model, "snapkv:window=8", 20)
    kvfold.generate(model, ids, cache=cache, **GREEDY)
    assert cache.get_seq_length() == 64 + 7
    assert cache.stats().kept == [[[27, 27]]] * 4


@pytest.mark.slow
@notices_drops
def test_longrope_with_budget_to_spare_is_stock():
    model = longrope()
    ids, mask = prompts((64, 53, 40))
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    for chunk in (None, 10):
        cache = CompressedCache(model, "snapkv:window=8", 1.0)
        options = {"attention_mask": mask, "prefill_chunk": chunk, **GREEDY}
        assert torch.equal(kvfold.generate(model, ids, cache=cache, **options), expected)


@notices_drops
def test_longrope_refuses_to_generate_across_its_limit():
    model = longrope()
    crossing, inside = prompts((28,))[0], prompts((20,))[0]
    cache = CompressedCache(model, "snapkv:window=8", 10)
    with pytest.raises(UnsupportedModel, match="32 tokens"):
        kvfold.generate(model, crossing, cache=cache, **GREEDY)
    assert cache.get_seq_length() == 0
    kvfold.generate(model, inside, cache=cache, **GREEDY)
    assert cache.get_seq_length() == 27 and cache.stats().kept[0][0] == [17, 17]


@notices_drops
def test_longrope_sinks_do_not_move():
    with pytest.raises(UnsupportedModel, match='positions="original"'):
        CompressedCache(longrope(), "streaming_llm", 20)
