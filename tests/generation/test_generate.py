# SPDX-License-Identifier: Apache-2.0
"""Modes of generation: chunks, sampling, beams and assistants, as transformers' own or refused."""

from __future__ import annotations

import math

import pytest
import torch
from packaging.version import Version

import kvfold
from kvfold import CompressedCache, KvfoldError
from kvfold.generation.reading import read_turn
from kvfold.hf import versions
from tests.helpers.budgets import (
    COMPRESSING,
    HOLDING,
    SMALL,
    compressed,
)
from tests.helpers.caches import (
    ALONE,
    BATCHES,
    GREEDY,
    PADDED,
    go_on,
    kept,
    positions,
)
from tests.helpers.longrope import assists, longrope
from tests.helpers.models import COUNTING_OTHERWISE, build, continuation, prompts
from tests.helpers.truth import Reader, stock_cache, worst


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64)


@pytest.mark.parametrize("helper", [{"prefill_chunk": 10}, {"num_beams": 2, "prefill_chunk": 10}])
def test_padding_is_found_without_a_mask_too(model, helper):
    """transformers takes the pad tokens of a prompt for padding when no mask is given."""
    ids, mask = prompts(PADDED)
    options = {**GREEDY, **helper}
    told, untold = (compressed(model, "snapkv:window=8") for _ in range(2))
    expected = kvfold.generate(model, ids, cache=told, attention_mask=mask, **options)
    assert torch.equal(kvfold.generate(model, ids, cache=untold, **options), expected)
    assert positions(untold) == positions(told)


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "gpt_oss", "gemma3n", "qwen3_5"])
def test_chunks_equal_one_shot_in_unusual_families(name):
    ids, mask = prompts(PADDED)
    model = build(name, torch.float64)
    whole, pieces = (compressed(model, "snapkv:window=8") for _ in range(2))
    expected = kvfold.generate(model, ids, cache=whole, attention_mask=mask, **GREEDY)
    options = {"attention_mask": mask, "prefill_chunk": 10, **GREEDY}
    assert torch.equal(kvfold.generate(model, ids, cache=pieces, **options), expected)
    assert positions(pieces) == positions(whole)


@pytest.mark.parametrize("name", COUNTING_OTHERWISE)
def test_chunks_are_read_at_the_positions_that_generate_counts(name):
    """These models' forwards count from elsewhere, or from 0 in every piece, if left to it."""
    ids, model = prompts(ALONE)[0], build(name, torch.float64)
    options = {"return_dict_in_generate": True, "output_logits": True, **GREEDY}
    logits = []
    for chunk in (None, 10):
        cache = compressed(model, "snapkv:window=8")
        made = kvfold.generate(model, ids, cache=cache, prefill_chunk=chunk, **options)
        logits.append(torch.stack(made.logits, 1))
    assert worst(*logits) <= 1e-4  # recurrent layers compute in float32


MODES = {
    "beams": {"num_beams": 3, "do_sample": False},
    "beams, three answers": {"num_beams": 3, "num_return_sequences": 3, "do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8},
    "three samples": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("mode", MODES)
def test_modes_with_budget_to_spare_are_stock(mode, lengths):
    ids, mask = prompts(lengths)
    model = build("llama")
    options = {"attention_mask": mask, "max_new_tokens": 10, **MODES[mode]}
    torch.manual_seed(3)
    expected = model.generate(ids, past_key_values=stock_cache(model), **options)
    for chunk in (None, 10):
        torch.manual_seed(3)
        cache = compressed(model, "snapkv:window=8", 1.0)
        got = kvfold.generate(model, ids, cache=cache, prefill_chunk=chunk, **options)
        assert torch.equal(got, expected)


@pytest.mark.cases(6)
@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("spec", ["snapkv:window=8", "h2o", "streaming_llm"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_run_with_small_budgets_and_twice_the_same(model, spec, mode, lengths):
    ids, mask = prompts(lengths)
    options = {"attention_mask": mask, "max_new_tokens": 10, **MODES[mode]}
    outs = []
    for chunk in (None, 16):
        torch.manual_seed(3)
        cache = compressed(model, spec)
        outs.append(kvfold.generate(model, ids, cache=cache, prefill_chunk=chunk, **options))
        expected = SMALL if spec in HOLDING else SMALL + 9
        assert kept(cache) == [expected]
    rows = len(lengths) * MODES[mode].get("num_return_sequences", 1)
    assert outs[0].shape == (rows, 74) and torch.equal(*outs)


def test_one_beam_of_several_is_the_greedy_answer_of_its_own_row(model):
    """Beams reorder rows at every step: a cache that does not follow answers for another row."""
    ids, _ = prompts(ALONE)
    cache = compressed(model, "tova")
    options = {"num_beams": 3, "do_sample": False, "max_new_tokens": 10}
    out = kvfold.generate(
        model, ids, cache=cache, output_scores=True, return_dict_in_generate=True, **options
    )
    # The score that beam search reports, from reading its answer with one beam's cache alone.
    reader = Reader(model, compressed(model, "tova"))
    steps = [reader(ids)[:, -1]]
    steps += [reader(token)[:, -1] for token in out.sequences[:, 64:-1].split(1, 1)]
    chosen = out.sequences[0, 64:]
    score = sum(s.log_softmax(-1)[0, t] for s, t in zip(steps, chosen, strict=True)) / 10
    torch.testing.assert_close(out.sequences_scores[0].double(), score, atol=1e-4, rtol=0)


def test_beams_go_on_from_an_earlier_turn(model):
    outs = []
    for chunk in (None, 10):
        cache = compressed(model, "snapkv:window=8", 0.3)
        text = go_on(model, prompts(ALONE)[0], cache)
        text = torch.cat([text, continuation(1, 20)], 1)
        outs.append(go_on(model, text, cache, prefill_chunk=chunk, num_beams=3, max_new_tokens=6))
        assert kept(cache) == [math.floor(0.3 * 92) + 5]
    assert torch.equal(*outs)


IN_ROUNDS = [spec for spec in COMPRESSING if bool(kvfold.parse(spec).stages().rounds)]


@pytest.mark.slow
@pytest.mark.cases(4)
@assists
@pytest.mark.parametrize("spec", [spec for spec in COMPRESSING if spec not in IN_ROUNDS])
@pytest.mark.parametrize("helper", ["prompt lookup", "assistant"])
def test_assisted_is_greedy_on_the_same_frozen_cache(model, spec, helper):
    ids = prompts((30,))[0].repeat(1, 2)  # repeats itself, so that lookup finds something
    by_hand, cache = compressed(model, spec), compressed(model, spec)
    reader = Reader(model, by_hand)
    reader(ids[:, :-1])
    with by_hand.frozen():
        expected = model.generate(ids, past_key_values=by_hand, do_sample=False, max_new_tokens=16)
    assistant = build("llama", torch.float64, num_hidden_layers=2)
    options = {"prompt lookup": {"prompt_lookup_num_tokens": 3}, "assistant": {}}[helper]
    if helper == "assistant":
        options["assistant_model"] = assistant
    got = kvfold.generate(model, ids, cache=cache, do_sample=False, max_new_tokens=16, **options)
    assert torch.equal(got, expected)


@assists
@pytest.mark.parametrize(("spec", "budget"), [("kvzip", 60), ("pyramidinfer", None)])
def test_assistance_follows_a_method_s_own_forwards(spec, budget):
    model, tokenizer = kvfold.bundled_model()
    ids = tokenizer("Here we go again. " * 12, return_tensors="pt").input_ids
    by_hand, cache = (
        kvfold.CompressedCache(model, spec, budget, tokenizer=tokenizer) for _ in range(2)
    )
    last = ids.shape[1] - 1
    with torch.no_grad():
        read_turn(model, by_hand, ids[:, :last], None, last, last)
    greedy = {"do_sample": False, "max_new_tokens": 8}
    with by_hand.frozen():
        expected = model.generate(ids, past_key_values=by_hand, **greedy)
    if spec == "pyramidinfer":
        with pytest.raises(kvfold.KvfoldError, match="in one piece"):
            kvfold.generate(
                model, ids, cache=cache, prompt_lookup_num_tokens=3, prefill_chunk=9, **greedy
            )
        assert cache.get_seq_length() == 0
    got = kvfold.generate(model, ids, cache=cache, prompt_lookup_num_tokens=3, **greedy)
    assert torch.equal(got, expected)


@assists
@pytest.mark.parametrize("spec", ["snapkv:window=8 + every:interval=4", *IN_ROUNDS])
def test_assistance_is_refused_to_methods_in_rounds(model, spec):
    """A frozen cache has no rounds, and would grow by the whole answer."""
    cache = compressed(model, spec)
    with pytest.raises(KvfoldError, match=r"evicts in rounds.*choose one"):
        kvfold.generate(model, prompts((64,))[0], cache=cache, prompt_lookup_num_tokens=3, **GREEDY)
    assert cache.get_seq_length() == 0


@assists
def test_assistance_works_with_sliding_layers():
    model = build("gemma3", torch.float64)
    ids = prompts((30,))[0].repeat(1, 2)
    by_hand, cache = compressed(model, "snapkv:window=8"), compressed(model, "snapkv:window=8")
    Reader(model, by_hand)(ids[:, :-1])
    with by_hand.frozen():
        expected = model.generate(ids, past_key_values=by_hand, do_sample=False, max_new_tokens=16)
    options = {"do_sample": False, "max_new_tokens": 16, "prompt_lookup_num_tokens": 3}
    assert torch.equal(kvfold.generate(model, ids, cache=cache, **options), expected)


def test_a_prompt_shorter_than_what_was_seen_is_refused(model):
    cache = CompressedCache(model, "knorm", 20)
    text = kvfold.generate(model, prompts((64,))[0], cache=cache, **GREEDY)
    for length in (20, 70, 71):
        with pytest.raises(KvfoldError, match="whole"):
            kvfold.generate(model, text[:, :length], cache=cache, **GREEDY)
    kvfold.generate(model, text[:, :72], cache=cache, **GREEDY)


@pytest.mark.parametrize("chunk", [0, -4])
def test_a_chunk_of_no_tokens_is_refused(model, chunk):
    cache = CompressedCache(model, "knorm", 20)
    with pytest.raises(KvfoldError, match="prefill_chunk"):
        kvfold.generate(model, prompts((64,))[0], cache=cache, prefill_chunk=chunk, **GREEDY)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefill_chunk": 2.5}, "prefill_chunk"),
        ({"prefill_chunk": 8, "compress": "per-chunk"}, "compress is"),
        ({"attention_mask": torch.ones(1, 9)}, "does not go with input_ids"),
    ],
)
def test_what_is_no_option_is_refused(model, options, said):
    cache = CompressedCache(model, "knorm", 20)
    with pytest.raises(KvfoldError, match=said):
        kvfold.generate(model, prompts((64,))[0], cache=cache, **options, **GREEDY)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("ids", [[[3, 4]], torch.tensor([3, 4]), torch.ones(1, 4)])
def test_ids_are_a_row_of_whole_numbers_for_each_prompt(model, ids):
    with pytest.raises(KvfoldError, match="a row for each prompt"):
        kvfold.generate(model, ids, cache=CompressedCache(model, "knorm", 20), **GREEDY)


@pytest.mark.parametrize("where", ["option", "configuration"])
@pytest.mark.parametrize("by", ["kvfold", "transformers"])
def test_steps_that_read_the_whole_text_again_are_refused(where, by):
    """With use_cache=False `generate` would do so, into a cache that holds it."""
    model, (ids, mask) = build("llama"), prompts((30,))
    cache, options = CompressedCache(model, "full"), {"attention_mask": mask, **GREEDY}
    if where == "option":
        options["use_cache"] = False
    else:
        model.generation_config.use_cache = False
    with pytest.raises(KvfoldError, match="use_cache=False"):
        if by == "kvfold":
            kvfold.generate(model, ids, cache=cache, **options)
        else:
            model.generate(ids, past_key_values=cache, **options)
    assert cache.get_seq_length() == 0


def test_a_prompt_of_one_token_behind_padding_is_refused_where_it_is_read_ahead(model):
    ids, mask = torch.tensor([[0, 0, 5]]), torch.tensor([[0, 0, 1]])
    with pytest.raises(KvfoldError, match="leave the padding out"):
        kvfold.generate(
            model, ids, cache=CompressedCache(model, "pyramidinfer"), attention_mask=mask, **GREEDY
        )


def test_assisted_decoding_outside_kvfold_generate_is_refused(model):
    cache = CompressedCache(model, "snapkv:window=8", 20)
    with pytest.raises(KvfoldError, match=r"kvfold\.generate"):
        model.generate(
            prompts((64,))[0], past_key_values=cache, prompt_lookup_num_tokens=3, **GREEDY
        )


def test_assisted_decoding_is_refused_where_transformers_answers_wrongly(model, monkeypatch):
    monkeypatch.setattr(versions, "ASSISTED_FROM", Version("99"))
    cache = CompressedCache(model, "snapkv:window=8", 20)
    with pytest.raises(KvfoldError, match="transformers 99"):
        kvfold.generate(model, prompts((64,))[0], cache=cache, prompt_lookup_num_tokens=3, **GREEDY)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(("spec", "budget"), [("full", None), ("snapkv:window=4", 0.5)])
@pytest.mark.parametrize("padding", [1, 2])
def test_a_later_turn_is_padded_behind_an_answer(model, spec, budget, padding):
    """Each row goes on as it does alone, though the answer's last token is still to be read."""
    first = torch.cat([prompts((20,), seed=n)[0] for n in range(2)])
    options = {"do_sample": False, "max_new_tokens": 3}
    cache = CompressedCache(model, spec, budget)
    out = kvfold.generate(model, first, cache=cache, **options)
    turn = torch.cat([prompts((6,), seed=n)[0] for n in (7, 8)])
    seen = torch.ones(2, out.shape[1] + 6, dtype=torch.long)
    seen[1, out.shape[1] : out.shape[1] + padding] = 0
    both = torch.cat([out, turn], 1)
    answers = kvfold.generate(model, both, cache=cache, attention_mask=seen, **options)[:, -3:]
    for row in range(2):
        alone = CompressedCache(model, spec, budget)
        said = kvfold.generate(model, first[row : row + 1], cache=alone, **options)
        rest = turn[row : row + 1, padding * row :]
        whole = torch.cat([said, rest], 1)
        answer = kvfold.generate(model, whole, cache=alone, **options)[0, -3:]
        assert torch.equal(answers[row], answer)


@assists
@pytest.mark.parametrize("length", [10, 30])
def test_the_default_length_counts_new_tokens(model, length):
    ids = prompts((length,))[0]
    for options in ({}, {"prompt_lookup_num_tokens": 3}):
        out = kvfold.generate(
            model, ids, cache=CompressedCache(model, "full"), do_sample=False, **options
        )
        assert out.shape[1] == length + 20
    with pytest.raises(kvfold.errors.UnsupportedModel, match="changes its rotary frequencies"):
        kvfold.generate(longrope(), prompts((28,))[0], cache=CompressedCache(longrope(), "full"))


@pytest.mark.parametrize("how", [{}, {"compress": "per_chunk"}])
def test_a_padded_turn_is_read_in_pieces(model, how):
    ids = torch.cat([prompts((10,), seed=n)[0] for n in range(2)])
    cache, options = CompressedCache(model, "full"), {"do_sample": False, "max_new_tokens": 3}
    out = kvfold.generate(model, ids, cache=cache, **options)
    whole = torch.cat([out, torch.cat([prompts((12,), seed=n)[0] for n in (7, 8)])], 1)
    mask = torch.ones_like(whole)
    mask[1, out.shape[1] : out.shape[1] + 8] = 0
    expected = model.generate(whole, attention_mask=mask, **options)
    options |= {"attention_mask": mask, "prefill_chunk": 4}
    assert torch.equal(kvfold.generate(model, whole, cache=cache, **options, **how), expected)


@pytest.mark.parametrize("spec", ["knorm + reindex", "keydiff + reindex"])
def test_a_conversation_goes_on_after_a_turn_that_left_nothing(model, spec):
    cache = CompressedCache(model, spec, 0.3)
    options = {"do_sample": False, "max_new_tokens": 4}
    out = kvfold.generate(model, prompts((3,))[0], cache=cache, **options)
    whole = torch.cat([out, continuation(1, 6)], 1)
    answer = kvfold.generate(model, whole, cache=cache, **options)
    assert answer.shape[1] == whole.shape[1] + 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["snapkv:window=8", "tova", "kivi:group=8,residual=8", "compactor", "non_causal"]
)
def test_products_beyond_float16_are_scaled_in_time(spec):
    own, ids = build("llama", torch.float16), prompts((40,))[0]
    for layer in own.model.layers:
        for weight in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
            weight.data.mul_(60)
    cache = compressed(own, spec)
    reader = Reader(own, cache)
    reader(ids)
    assert reader(continuation(1, 1)).isfinite().all()


def test_a_call_that_fails_after_reading_ahead_leaves_no_prefill_open(model):
    """The next prompt, which is shorter, is compressed at its end."""
    ids, cache = prompts((100,))[0], CompressedCache(model, "snapkv:window=8", 20)
    with pytest.raises(ValueError, match="unknown"):
        kvfold.generate(model, ids, cache=cache, prefill_chunk=40, unknown=1, **GREEDY)
    assert cache.get_seq_length() == 60
    out = kvfold.generate(model, ids[:, :80], cache=cache, **GREEDY)
    assert kept(cache) == [20 + 7]
    fresh = CompressedCache(model, "snapkv:window=8", 20)
    assert torch.equal(out, kvfold.generate(model, ids[:, :80], cache=fresh, **GREEDY))
    assert positions(cache) == positions(fresh)
