# SPDX-License-Identifier: Apache-2.0
"""reuse="prefix": a cache goes back to the prefix that a prompt shares with what was read."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version
from transformers import PreTrainedModel

import kvfold
from kvfold import CompressedCache, KvfoldError
from kvfold.hf import versions
from tests.helpers.longrope import assists, longrope, notices_drops
from tests.helpers.models import build, prompts
from tests.helpers.turns import changed, on, turn


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("llama")


@pytest.mark.cases(3)
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "snapkv:window=8", "streaming_llm", "tova", "adakv"])
@pytest.mark.parametrize("column", [0, 20, 42])
def test_a_cache_that_evicted_nothing_goes_back_to_the_shared_prefix(model, spec, column):
    budget = None if spec == "full" else 70
    cache = CompressedCache(model, spec, budget)
    edited = changed(on(turn(model, cache, prompts((40,))[0]), 60), 0, column)
    fresh = CompressedCache(model, spec, budget)
    expected = turn(model, fresh, edited, output_logits=True, return_dict_in_generate=True)
    out = turn(
        model, cache, edited, reuse="prefix", output_logits=True, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(expected.logits))
    for layer in range(len(cache.states)):
        for one, other in zip(cache.positions(layer)[0], fresh.positions(layer)[0], strict=True):
            assert torch.equal(one, other)


def test_an_answer_is_given_again(model):
    """The prompt itself, once more: its last token is read anew."""
    ids, cache = prompts((40,))[0], CompressedCache(model, "full")
    said = turn(model, cache, ids)
    with pytest.raises(KvfoldError, match="at least one new token"):
        turn(model, cache, ids)
    assert torch.equal(turn(model, cache, ids, reuse="prefix"), said)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["snapkv:window=8", "h2o", "kivi:group=8,residual=8"])
def test_an_eviction_is_not_taken_back(model, spec):
    budget = None if spec.startswith("kivi") else 20
    cache, expected = (CompressedCache(model, spec, budget) for _ in range(2))
    said = turn(model, cache, prompts((64,))[0])
    turn(model, expected, prompts((64,))[0])
    with pytest.raises(KvfoldError, match="since"):
        turn(model, cache, changed(on(said), 0, 40), reuse="prefix")
    assert torch.equal(turn(model, cache, on(said)), turn(model, expected, on(said)))


def test_attention_that_was_added_up_is_not_taken_back(model):
    """Nothing is evicted yet, but sums hold what the tokens to be taken back attended to."""
    cache = CompressedCache(model, "h2o", 100)
    said = turn(model, cache, prompts((40,))[0])
    with pytest.raises(KvfoldError, match="scored"):
        turn(model, cache, changed(on(said), 0, 30), reuse="prefix")


def test_nothing_in_common_starts_anew_even_after_an_eviction(model):
    cache, ids = CompressedCache(model, "snapkv:window=8", 20), prompts((64,), seed=7)[0]
    turn(model, cache, prompts((64,))[0])
    out = turn(model, cache, ids, reuse="prefix")
    assert torch.equal(out, turn(model, CompressedCache(model, "snapkv:window=8", 20), ids))


def test_only_a_prefix_can_be_reused(model):
    with pytest.raises(KvfoldError, match='"prefix"'):
        turn(model, CompressedCache(model, "full"), prompts((40,))[0], reuse="suffix")


def test_a_block_that_keeps_what_there_is_is_not_started_anew(model):
    cache = CompressedCache(model, "full")
    turn(model, cache, prompts((40,))[0])
    for block in (cache.frozen, cache.reading):
        with block(), pytest.raises(KvfoldError, match="cannot start anew"):
            turn(model, cache, prompts((50,), seed=7)[0], reuse="prefix")
    assert cache.get_seq_length() == 45


def test_a_prompt_that_a_method_reads_by_itself_is_read_by_it_again():
    """KVzip repeats a first prompt only, also one that begins as another did."""
    model, tokenizer = kvfold.bundled_model()
    one, other = (
        tokenizer(text * 30, return_tensors="pt").input_ids for text in ("Here. ", "We. ")
    )
    other = torch.cat([one[:, :4], other], 1)
    cache, fresh = (CompressedCache(model, "kvzip", 60, tokenizer=tokenizer) for _ in range(2))
    turn(model, cache, one[:, :40])
    out = turn(model, cache, other, reuse="prefix")
    assert torch.equal(out, turn(model, fresh, other))
    assert cache.stats().kept == fresh.stats().kept


def test_a_call_that_is_refused_takes_nothing_back(model, monkeypatch):
    """Whatever refuses it: the cache goes on as if the call had not been made."""
    cache, expected = (CompressedCache(model, "full") for _ in range(2))
    said = turn(model, cache, prompts((40,))[0])
    turn(model, expected, prompts((40,))[0])
    monkeypatch.setattr(versions, "ASSISTED_FROM", Version("99"))
    places = {"position_ids": torch.arange(52)[None]}
    several = {"do_sample": True, "num_return_sequences": 2, **places}
    pieces = {"prefill_chunk": 8, **places}
    assisted = {"prompt_lookup_num_tokens": 3}
    for column, options in ((20, several), (20, pieces), (0, pieces), (0, assisted)):
        with pytest.raises(KvfoldError, match=r"must reach|transformers 99"):
            turn(model, cache, changed(on(said), 0, column), reuse="prefix", **options)
        assert cache.stats() == expected.stats()
    assert torch.equal(turn(model, cache, on(said)), turn(model, expected, on(said)))


DRAFTS = pytest.param({"prompt_lookup_num_tokens": 3}, marks=assists)


@pytest.mark.parametrize("column", [0, 20], ids=["anew", "prefix"])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 7}, DRAFTS])
@pytest.mark.parametrize("columns", [[22, 25, 28, 29], [-2, -1]], ids=["between", "behind"])
def test_padding_that_is_refused_takes_nothing_back(model, column, options, columns):
    cache = CompressedCache(model, "snapkv:window=8", 200)
    said = turn(model, cache, prompts((40,))[0])
    before, other = cache.stats(), changed(on(said), 0, column)
    mask = torch.ones_like(other)
    mask[:, columns] = 0
    with pytest.raises(KvfoldError, match="pad on the left"):
        turn(model, cache, other, attention_mask=mask, reuse="prefix", **options)
    assert cache.stats() == before


def test_a_piecewise_reading_that_a_method_refuses_takes_nothing_back(model):
    cache, expected = (CompressedCache(model, "pyramidinfer") for _ in range(2))
    said = turn(model, cache, prompts((40,))[0])
    turn(model, expected, prompts((40,))[0])
    with pytest.raises(KvfoldError, match="in one piece"):
        turn(model, cache, changed(on(said), 0, 20), reuse="prefix", prefill_chunk=8)
    assert cache.stats() == expected.stats()
    assert torch.equal(turn(model, cache, on(said)), turn(model, expected, on(said)))


@notices_drops
def test_a_length_that_a_model_cannot_cross_takes_nothing_back():
    model = longrope()
    cache = CompressedCache(model, "full")
    said = turn(model, cache, prompts((20,))[0])
    with pytest.raises(KvfoldError, match="32 tokens"):
        turn(model, cache, changed(on(said, 4), 0, 10), reuse="prefix", max_new_tokens=8)
    assert cache.get_seq_length() == 25
