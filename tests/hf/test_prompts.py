# SPDX-License-Identifier: Apache-2.0
"""Plain `model.generate` goes on from a cache with the whole text or its new part, and no other."""

from __future__ import annotations

import copy

import pytest
import torch

import kvfold
from kvfold import CompressedCache, KvfoldError
from kvfold.hf.versions import CACHE, CACHE_NAMES
from tests.helpers.caches import GREEDY
from tests.helpers.models import build, continuation, prompts
from tests.helpers.truth import stock_cache

ones = torch.ones(1, 200, dtype=torch.long)
LOOKUP = {"prompt_lookup_num_tokens": 3}
TEXT = prompts((64,))[0]
WHOLE = torch.cat([TEXT, continuation(1, 9)], 1)


def begun(model, spec="snapkv:window=8", budget=20):
    cache = CompressedCache(model, spec, budget)
    with torch.no_grad():
        model(TEXT, past_key_values=cache)
    return cache


@pytest.mark.slow
@pytest.mark.cases(4)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "gpt2", "bamba"])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 16}, {"num_beams": 2}, LOOKUP])
@pytest.mark.parametrize("length", [2, 50, 64])
@torch.no_grad()
def test_a_prompt_that_is_not_longer_than_what_was_read_is_refused(family, options, length):
    if options == LOOKUP and family in ("qwen3_5", "bamba"):
        pytest.skip("transformers has no drafts for recurrent layers")
    model = build(family)
    cache = begun(model)
    if options.get("num_beams"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(KvfoldError, match=r"at least one new token|cache has read 64|rejected"):
        model.generate(TEXT[:, :length], past_key_values=cache, **options, **GREEDY)
    assert cache.get_seq_length() == 64


@pytest.mark.cases(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("enabled", "name"), [(False, CACHE), *((True, name) for name in CACHE_NAMES)]
)
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 16}])
@pytest.mark.parametrize("length", [30, 64, 90])
@torch.no_grad()
def test_another_text_is_refused_where_it_parts(enabled, name, options, length):
    model = build("llama")
    cache, other = begun(model), torch.cat([TEXT, continuation(1, 26)], 1)[:, :length].clone()
    other[0, 20] = 3 + (other[0, 20] + 1) % 100
    if enabled:
        kvfold.enable(model, "knorm", 0.5)
    with pytest.raises(KvfoldError, match="another text: it differs from the prompt at 20"):
        model.generate(other, **{name: cache}, **options, **GREEDY)
    assert cache.get_seq_length() == 64


@pytest.mark.parametrize("width", [9, 29, 64, 72, 74, 136])
@torch.no_grad()
def test_a_mask_of_neither_the_prompt_nor_its_text_is_refused(width):
    """Ones alone would not reach the model."""
    model = build("llama")
    cache = begun(model)
    with pytest.raises(KvfoldError, match=f"has {width} columns, and the prompt 73.*mask of 137"):
        model.generate(WHOLE, attention_mask=ones[:, :width], past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == 64


@pytest.mark.parametrize("length", [40, 64])
@torch.no_grad()
def test_embeddings_that_are_not_longer_than_what_was_read_are_refused(length):
    model = build("llama")
    cache, embed = begun(model), model.get_input_embeddings()
    with pytest.raises(KvfoldError, match="at least one new token"):
        model.generate(inputs_embeds=embed(TEXT[:, :length]), past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == 64


@torch.no_grad()
def test_drafts_of_a_whole_text_are_refused_as_it_would_be_read_again():
    model = build("llama")
    cache = begun(model)
    with cache.frozen(), pytest.raises(KvfoldError, match=r"begin at 0, and|needs 137"):
        model.generate(WHOLE, past_key_values=cache, **LOOKUP, **GREEDY)
    assert cache.get_seq_length() == 64


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "gpt2"])
@torch.no_grad()
def test_a_whole_text_and_its_new_part_go_on_as_with_a_stock_cache(family, options):
    model, new = build(family, torch.float64), WHOLE[:, 64:]
    expected = model.generate(WHOLE, past_key_values=stock_cache(model), **options, **GREEDY)
    given = [
        ({"input_ids": WHOLE}, 0),
        ({"inputs": WHOLE, "attention_mask": ones[:, :73]}, 0),
        ({"input_ids": new, "attention_mask": ones[:, :73]}, 64),
    ]
    for inputs, left_out in given:
        cache = begun(model, "full", None)
        if options:
            cache.batch_repeat_interleave(2)
        out = model.generate(past_key_values=cache, **inputs, **options, **GREEDY)
        assert torch.equal(out, expected[:, left_out:])
    cache = begun(model, "full", None)
    embedded = model.get_input_embeddings()(WHOLE)
    if not options:
        out = model.generate(inputs_embeds=embedded, past_key_values=cache, **GREEDY)
        assert torch.equal(out, expected[:, 73:])


@torch.no_grad()
def test_padded_rows_go_on():
    model = build("llama", torch.float64)
    (ids, mask), later = prompts((40, 31)), continuation(2, 5)
    whole, seen = torch.cat([ids, later], 1), torch.cat([mask, torch.ones(2, 5)], 1).long()
    expected = model.generate(whole, attention_mask=seen, **GREEDY)
    cache = CompressedCache(model, "full")
    kvfold.generate(model, ids, attention_mask=mask, cache=cache, max_new_tokens=1)
    assert torch.equal(
        model.generate(whole, attention_mask=seen, past_key_values=cache, **GREEDY), expected
    )
    wrong = whole.clone()
    wrong[1, 12] += 1
    cache = CompressedCache(model, "full")
    kvfold.generate(model, ids, attention_mask=mask, cache=cache, max_new_tokens=1)
    with pytest.raises(KvfoldError, match=r"another text: .* row 1, column 12"):
        model.generate(wrong, attention_mask=seen, past_key_values=cache, **GREEDY)


@torch.no_grad()
def test_a_copy_of_the_model_checks_its_own_and_a_disabled_one_nothing():
    model = build("llama")
    cache = begun(model)
    twin = copy.deepcopy(model)
    assert vars(twin)["_prefill"].model is twin
    kvfold.disable(model)
    assert "_prefill" not in vars(model)
    other = prompts((64,), seed=4)[0]
    expected = model.generate(other, **GREEDY)
    assert torch.equal(
        model.generate(other, past_key_values=stock_cache(model), **GREEDY), expected
    )
    assert cache.get_seq_length() == 64


@pytest.mark.parametrize("first", [0, 20, 63])
@torch.no_grad()
def test_positions_that_were_read_are_refused(first):
    model = build("llama")
    cache, places = begun(model), torch.arange(first, first + 9)[None]
    with pytest.raises(KvfoldError, match=f"begin at {first}, and the cache has read 64"):
        model(WHOLE[:, 64:], position_ids=places, past_key_values=cache)
    model(WHOLE[:, 64:], position_ids=torch.arange(64, 73)[None], past_key_values=cache)
    assert cache.get_seq_length() == 73


@pytest.mark.parametrize("width", [1, 63, 65])
@torch.no_grad()
def test_a_first_prompt_with_a_mask_of_another_length_is_refused(width):
    model = build("llama")
    cache = CompressedCache(model, "knorm", 0.5)
    with pytest.raises(KvfoldError, match=f"has {width} columns, and the prompt 64"):
        model.generate(TEXT, attention_mask=ones[:, :width], past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == 0
