# SPDX-License-Identifier: Apache-2.0
"""However a text is read, batched, copied, saved or continued: the same cache, the same answer."""

from __future__ import annotations

import contextlib
import copy
import io
import math
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

import kvfold
from kvfold.generation.generate import read_turn
from kvfold.hf.versions import ASSISTED_FROM
from tests.helpers.budgets import (
    APPENDING,
    COMPRESSING,
    HOLDING,
    METHODS,
    SMALL,
    UNIFORM,
    compressed,
    encodes,
    moves,
)
from tests.helpers.caches import (
    ALONE,
    BATCHES,
    GREEDY,
    OVERSPENDING,
    PADDED,
    STATEFUL,
    ask,
    bits,
    counted_bytes,
    decode,
    go_on,
    kept,
    positions,
    reachable_bytes,
    same,
    start,
)
from tests.helpers.caches import model as model
from tests.helpers.models import build, continuation, prompts
from tests.helpers.truth import Reader, stock_cache

EVERY = pytest.mark.parametrize("spec", METHODS)
COMPRESSES = pytest.mark.parametrize("spec", COMPRESSING)


# --- chunks ----------------------------------------------------------------------------------


@BATCHES
@EVERY
def test_chunks_equal_one_shot(model, spec, lengths):
    ids, mask = prompts(lengths)
    whole = compressed(model, spec)
    expected = kvfold.generate(model, ids, cache=whole, attention_mask=mask, **GREEDY)
    for chunk in (10, 16, 63):
        cache = compressed(model, spec)
        options = {"attention_mask": mask, "prefill_chunk": chunk, **GREEDY}
        assert torch.equal(kvfold.generate(model, ids, cache=cache, **options), expected)
        assert positions(cache) == positions(whole)


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


@COMPRESSES
def test_reading_without_a_length_equals_one_shot(model, spec):
    ids, mask = prompts(PADDED)
    whole = start(model, spec, PADDED)
    reader = Reader(model, compressed(model, spec), mask[:, :30])
    with reader.cache.reading():
        reader(ids[:, :30])  # the last row is padding so far
        reader(ids[:, 30:])
        assert reader.cache.stats().kept[0] == [[length] * 2 for length in PADDED]
    assert positions(reader.cache) == positions(whole.cache)
    for got, expected in zip(decode(reader), decode(whole), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


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
            assert torch.equal(mine.query_window.columns, expected)
            of_mine, of_theirs = mine.query_window.attended, theirs.query_window.attended
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


@COMPRESSES
def test_generate_of_transformers_equals_ours(model, spec):
    ids, mask = prompts(PADDED)
    ours, theirs = compressed(model, spec), compressed(model, spec)
    options = {"attention_mask": mask, **GREEDY}
    expected = kvfold.generate(model, ids, cache=ours, **options)
    assert torch.equal(model.generate(ids, past_key_values=theirs, **options), expected)
    assert positions(ours) == positions(theirs)


# --- rows, caches, samples -------------------------------------------------------------------


@EVERY
def test_a_padded_row_is_its_prompt_alone(model, spec):
    ids, mask = prompts(PADDED)
    cache = compressed(model, spec)
    batch = kvfold.generate(model, ids, cache=cache, attention_mask=mask, **GREEDY)
    for row, length in enumerate(PADDED):
        padding = 64 - length
        alone = compressed(model, spec)
        out = kvfold.generate(model, ids[row : row + 1, padding:], cache=alone, **GREEDY)
        assert torch.equal(out[0], batch[row, padding:])
        for layer, expected in zip(positions(cache), positions(alone), strict=True):
            assert [[at - padding for at in head] for head in layer[row]] == expected[0]


@pytest.mark.parametrize(
    ("change", "argument", "rows"),
    [
        ("reorder_cache", torch.tensor([2, 0, 0]), [2, 0, 0]),
        ("batch_select_indices", torch.tensor([1, 2]), [1, 2]),
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
    ],
    ids=["reorder", "select", "repeat"],
)
@EVERY
def test_rows_take_all_that_is_theirs_along(model, spec, change, argument, rows):
    """What beams do: from then on each row goes on like the row it was taken from."""
    ids, mask = prompts(PADDED)
    steps = continuation(3, 8).split(1, 1)
    reader, straight = (
        start(model, spec, PADDED),
        Reader(model, compressed(model, spec), mask[rows]),
    )
    straight(ids[rows])
    for token in steps[:4]:
        reader(token)
        straight(token[rows])
    getattr(reader.cache, change)(argument)
    reader.mask = reader.mask[rows]
    assert positions(reader.cache) == positions(straight.cache)
    for token in steps[4:]:
        got, expected = reader(token[rows]), straight(token[rows])
        # By how many rows there are, the last bit of D2O's similarities (float32) may differ.
        atol = 4e-6 if kvfold.parse(spec).stages().merge_one else 1e-6
        torch.testing.assert_close(got, expected, atol=atol, rtol=0)
    assert positions(reader.cache) == positions(straight.cache)


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


@EVERY
def test_two_caches_on_one_model_never_meet(model, spec):
    other = "random" if spec != "random" else "knorm"
    separate = [decode(start(model, s), seed=i) for i, s in enumerate((spec, other))]
    readers = [start(model, s) for s in (spec, other)]
    tokens = [continuation(1, 6, seed).split(1, 1) for seed in (0, 1)]
    for step in range(6):
        for reader, ids, expected in zip(readers, tokens, separate, strict=True):
            assert torch.equal(reader(ids[step]), expected[step])


@EVERY
def test_the_order_of_samples_changes_nothing(model, spec):
    samples = [prompts((length,), seed)[0] for seed, length in enumerate((64, 41))]

    def answer(ids: Tensor) -> tuple[Tensor, Any]:
        cache = compressed(model, spec)
        return kvfold.generate(model, ids, cache=cache, **GREEDY), positions(cache)

    forwards = [answer(ids) for ids in samples]
    backwards = [answer(ids) for ids in reversed(samples)][::-1]
    for (out, where), (again, there) in zip(forwards, backwards, strict=True):
        assert torch.equal(out, again) and where == there


def test_a_reset_cache_is_as_new(model):
    reader = start(model, "h2o", PADDED)
    expected = decode(start(model, "h2o"))
    reader.cache.reset()
    again = Reader(model, reader.cache)
    again(prompts(ALONE)[0])
    assert same(decode(again), expected)


def test_the_seed_chooses_what_random_keeps(model):
    first, second, third = (positions(start(model, "random", seed=s).cache) for s in (0, 0, 1))
    assert first == second != third


# --- copies and files ------------------------------------------------------------------------


@BATCHES
@EVERY
def test_a_copy_continues_like_the_original(model, spec, lengths):
    reader = start(model, spec, lengths)
    decode(reader, 3, seed=5)
    twin = copy.deepcopy(reader.cache)
    mask = reader.mask
    expected = decode(reader)
    second = Reader(model, twin, mask)
    second.started = True
    assert same(decode(second), expected)
    assert positions(twin) == positions(reader.cache)


@BATCHES
@COMPRESSES
def test_a_saved_cache_holds_what_it_held(model, spec, lengths):
    reader = start(model, spec, lengths)
    decode(reader, 3)
    file = io.BytesIO()
    torch.save(reader.cache, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert positions(loaded) == positions(reader.cache)
    assert same(bits(loaded), bits(reader.cache))
    assert loaded.stats() == reader.cache.stats()


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


# --- turns -----------------------------------------------------------------------------------


@COMPRESSES
def test_later_turns_are_compressed_again(model, spec):
    cache = compressed(model, spec, 0.3)
    text = prompts(ALONE)[0]
    for turn in range(3):
        text = torch.cat([text, continuation(1, 20, seed=turn)], 1)
        expected = 4 * math.floor(0.3 * text.shape[1])
        text = go_on(model, text, cache)
        # The last token generated was never read; the seven before it were.
        assert cache.get_seq_length() == text.shape[1] - 1
        per_head = [sum(layer[0][head] for layer in cache.stats().kept) for head in range(2)]
        generated = 0 if spec in HOLDING else 4 * 7
        if spec not in OVERSPENDING:
            assert sum(per_head) == 2 * (expected + generated)
            assert spec.startswith("adakv") or per_head[0] == per_head[1]
        else:
            assert all(total >= expected + generated for total in per_head)


@COMPRESSES
def test_chunks_of_a_later_turn_equal_one_shot(model, spec):
    caches = compressed(model, spec, 0.3), compressed(model, spec, 0.3)
    text = prompts(ALONE)[0]
    outs = [go_on(model, text, cache) for cache in caches]
    text = torch.cat([outs[0], continuation(1, 30)], 1)
    whole = go_on(model, text, caches[0])
    pieces = go_on(model, text, caches[1], prefill_chunk=10)
    assert torch.equal(whole, pieces)
    assert positions(caches[0]) == positions(caches[1])


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("spec", [spec for spec in METHODS if not encodes(spec)])
def test_padding_between_turns_is_not_seen_either(model, spec, chunk):
    """Questions of 20 and 12 tokens to prompts of 64 and 53: the short one is padded in between."""
    ids, mask = prompts((64, 53))
    question, padding = prompts((20, 12), seed=7)
    batch, alone = compressed(model, spec), compressed(model, spec)
    go_on(model, ids, batch, attention_mask=mask, max_new_tokens=1)
    text, seen = torch.cat([ids, question], 1), torch.cat([mask, padding], 1)
    together = go_on(model, text, batch, attention_mask=seen, prefill_chunk=chunk)
    go_on(model, ids[1:, 11:], alone, max_new_tokens=1)
    single = go_on(model, text[1:][:, seen[1].bool()], alone, prefill_chunk=chunk)
    assert torch.equal(together[1, -8:], single[0, -8:])
    columns = torch.cat([seen[1].nonzero()[:, 0], torch.arange(84, 92)])
    for layer, expected in zip(positions(batch), positions(alone), strict=True):
        assert layer[1] == [[columns[at].item() for at in head] for head in expected[0]]


@pytest.mark.parametrize("spec", UNIFORM)
def test_what_was_evicted_stays_evicted(model, spec):
    reader = start(model, spec)
    before = positions(reader.cache)
    reader(continuation(1, 20))
    for layer, old in zip(positions(reader.cache), before, strict=True):
        for head, gone in zip(layer[0], old[0], strict=True):
            assert len(head) == SMALL
            assert {at for at in head if at < 64} <= set(gone)


@BATCHES
@pytest.mark.parametrize("spec", HOLDING)
def test_decoding_holds_the_size(model, spec, lengths):
    reader = start(model, spec, lengths)
    before = reader.cache.stats().kept
    for token in continuation(len(lengths), 10).split(1, 1):
        reader(token)
        assert reader.cache.stats().kept == before


@pytest.mark.parametrize("spec", HOLDING)
def test_a_prompt_of_one_token_is_held_too(model, spec):
    cache = compressed(model, spec, 8)
    kvfold.generate(model, torch.tensor([[7]]), cache=cache, max_new_tokens=20, do_sample=False)
    assert kept(cache) == [8]


@pytest.mark.parametrize("spec", APPENDING)
def test_generated_tokens_come_on_top(model, spec):
    reader = start(model, spec)
    before = positions(reader.cache)
    decode(reader, 5)
    new = list(range(64, 69))
    assert positions(reader.cache) == [[[h + new for h in row] for row in x] for x in before]


@BATCHES
@EVERY
def test_questions_leave_a_frozen_cache_as_it_was(model, spec, lengths):
    reader = start(model, spec, lengths)
    decode(reader, 2)
    untouched = copy.deepcopy(reader.cache)
    if moves(spec):
        ask(reader, seed=3)  # from now on the stored sinks are where this length wants them
    before, where = bits(reader.cache), positions(reader.cache)
    first = ask(reader, seed=1)
    assert not torch.equal(ask(reader, seed=2), first)
    assert torch.equal(ask(reader, seed=1), first)
    assert positions(reader.cache) == where and same(bits(reader.cache), before)
    second = Reader(model, untouched, reader.mask)
    second.started = True
    assert same(decode(reader), decode(second))
    assert positions(reader.cache) == positions(untouched)


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


@COMPRESSES
def test_nothing_is_evicted_while_frozen(model, spec):
    reader = start(model, spec)
    before = positions(reader.cache)
    with reader.cache.frozen():
        reader(continuation(1, 12))
        decode(reader, 3)
    new = list(range(64, 79))
    assert positions(reader.cache) == [[[h + new for h in row] for row in x] for x in before]


def test_taking_back_evicted_tokens_is_refused_and_changes_nothing(model):
    for spec in ("snapkv:window=8", "knorm:skip_layers=0", "pyramidkv:window=8"):
        reader = start(model, spec, budget=30)
        before, where = bits(reader.cache), positions(reader.cache)
        with pytest.raises(kvfold.KvfoldError, match="evicted"):
            reader.cache.crop(-30)
        assert reader.cache.get_seq_length() == 64
        assert [layer.get_seq_length() for layer in reader.cache.layers] == [64] * 4
        assert positions(reader.cache) == where and same(bits(reader.cache), before)


# --- generate's modes ------------------------------------------------------------------------

MODES = {
    "beams": {"num_beams": 3, "do_sample": False},
    "beams, three answers": {"num_beams": 3, "num_return_sequences": 3, "do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8},
    "three samples": {"do_sample": True, "num_return_sequences": 3},
}


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


assisted = pytest.mark.skipif(
    Version(transformers.__version__) < ASSISTED_FROM, reason="refused by this transformers"
)


@assisted
@pytest.mark.parametrize("spec", COMPRESSING)
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


@assisted
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


@assisted
def test_assistance_works_with_sliding_layers():
    model = build("gemma3", torch.float64)
    ids = prompts((30,))[0].repeat(1, 2)
    by_hand, cache = compressed(model, "snapkv:window=8"), compressed(model, "snapkv:window=8")
    Reader(model, by_hand)(ids[:, :-1])
    with by_hand.frozen():
        expected = model.generate(ids, past_key_values=by_hand, do_sample=False, max_new_tokens=16)
    options = {"do_sample": False, "max_new_tokens": 16, "prompt_lookup_num_tokens": 3}
    assert torch.equal(kvfold.generate(model, ids, cache=cache, **options), expected)


@BATCHES
@EVERY
def test_bytes_are_those_of_all_storages_alive(model, spec, lengths):
    reader = start(model, spec, lengths)
    assert counted_bytes(reader.cache) == reachable_bytes(reader.cache)
    decode(reader, 5)
    assert counted_bytes(reader.cache) == reachable_bytes(reader.cache)
    ask(reader, seed=1)
    assert counted_bytes(reader.cache) == reachable_bytes(reader.cache)


@EVERY
def test_bytes_while_a_turn_is_read_are_those_of_all_storages_alive(model, spec):
    ids, mask = prompts(PADDED)
    reader = Reader(model, compressed(model, spec), mask[:, :50])
    with reader.cache.reading():
        reader(ids[:, :50])
        assert counted_bytes(reader.cache) == reachable_bytes(reader.cache)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "gpt_neox"])
def test_full_bytes_are_those_of_the_stock_cache(name):
    model = build(name, torch.bfloat16)
    reader = start(model, "snapkv:window=8", PADDED)
    decode(reader, 3)
    stock = Reader(model, stock_cache(model), prompts(PADDED)[1])
    stock(prompts(PADDED)[0])
    for token in continuation(3, 3).split(1, 1):
        stock(token)
    own = {i for i, x in enumerate(reader.cache.layers) if x in reader.cache.compressed_layers}
    tensors = [x for i in own for x in (stock.cache.layers[i].keys, stock.cache.layers[i].values)]
    assert reader.cache.stats().nbytes_full == sum(t.numel() * t.element_size() for t in tensors)


def test_a_small_budget_costs_few_bytes(model):
    reader = Reader(model, compressed(model, "snapkv:window=8", 0.1))
    reader(prompts((2000,))[0])
    stats = reader.cache.stats()
    assert kept(reader.cache) == [200]
    assert stats.nbytes < 0.2 * stats.nbytes_full and stats.ratio < 0.2
    assert reachable_bytes(reader.cache) < 0.2 * stats.nbytes_full


@pytest.mark.parametrize(("budget", "share"), [(20, None), (21, None), (0.3, 0.3), (0.77, 0.77)])
@pytest.mark.parametrize("spec", [s for s in COMPRESSING if s not in OVERSPENDING])
def test_the_budget_is_spent_exactly(model, spec, budget, share):
    if share and spec.endswith("window=8"):
        share = max(share, 0.35)  # the window must fit in the shortest row's budget
        budget = share
    cache = start(model, spec, PADDED, budget=budget).cache
    for row, length in enumerate(PADDED):
        expected = 4 * (math.floor(share * length) if share else min(budget, length))
        spent = [sum(layer[row][head] for layer in cache.stats().kept) for head in range(2)]
        assert sum(spent) == 2 * expected
        assert spec.startswith("adakv") or spent[0] == spent[1]
        for head in range(2):
            assert all(
                len(positions(cache)[layer][row][head]) == cache.stats().kept[layer][row][head]
                for layer in range(4)
            )


@pytest.mark.parametrize("more", [0, 1, 2, 5])
@pytest.mark.parametrize("protect", [[], [(6, 10)]], ids=["", "protected"])
@pytest.mark.parametrize(
    "spec",
    [
        *(s for s in COMPRESSING if s not in OVERSPENDING),
        "pyramidkv:window=1",
        "pyramidkv:window=2 + adakv",
        "d2o:recent=0.9",
        "d2o:allocation=reciprocal",
    ],
)
def test_a_budget_near_what_is_forced_is_spent_exactly(model, spec, protect, more):
    """Layers whose share would be below it take the rest from the others."""
    least = kvfold.parse(spec).stages().forced.least + sum(b - a for a, b in protect)
    budget = least + more
    cache = start(model, spec, PADDED, budget=max(budget, 1), protect=protect).cache
    spent = torch.tensor(cache.stats().kept).sum((0, 2))
    assert spent.tolist() == [8 * min(max(budget, 1), length) for length in PADDED]
    assert not cache.stats().forced_over_budget


@pytest.mark.parametrize("spec", UNIFORM)
def test_every_layer_of_a_uniform_method_keeps_the_same(model, spec):
    assert kept(start(model, spec, PADDED).cache) == [SMALL]


def test_a_budget_in_bytes_is_not_exceeded(model):
    cache = compressed(model, "knorm", "40000B")
    Reader(model, cache)(prompts((300,))[0])
    stats = cache.stats()
    assert 0.9 * 40000 < stats.kv_bytes + stats.position_bytes <= 40000


# --- what the user protects ------------------------------------------------------------------


@BATCHES
@COMPRESSES
def test_protected_spans_survive(model, spec, lengths):
    spans = [(5, 9), (17, 19)]
    reader = start(model, spec, lengths, protect=spans)
    decode(reader, 10)
    rows = len(lengths)
    reader(continuation(rows, 12, seed=9))
    for row, length in enumerate(lengths):
        wanted = {64 - length + at for first, last in spans for at in range(first, last)}
        for layer in positions(reader.cache):
            assert all(wanted <= set(head) for head in layer[row])
    assert not all(set(range(20)) <= set(head) for head in positions(reader.cache)[0][0])


@pytest.mark.parametrize("kind", ["reindex", "original"])
@pytest.mark.parametrize("read", [2, 10, 21, 30])
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_more_sinks_than_the_budget_or_the_text_are_all_kept(model, kind, read, ratio):
    """The first tokens stay until all sinks are there; then the newest is seen beside them."""
    sinks, total = 20, 36
    spec = f"streaming_llm:sinks={sinks},positions={kind}"
    cache = kvfold.CompressedCache(model, spec, budget=ratio)
    ids = prompts((total,))[0]
    reader = Reader(model, cache)
    reader(ids[:, :read])
    with torch.no_grad():
        for step in range(read, total):
            logits = reader(ids[:, step : step + 1])[:, -1]
            seen = sorted({*range(min(sinks, step)), step})
            assert positions(cache)[0][0][0] == [i for i in range(step + 1) if i < sinks]
            places = range(len(seen)) if kind == "reindex" else seen
            # Keys and values of sinks depend on the sinks alone: a short text is the whole truth.
            truth = model(ids[:, seen], position_ids=torch.tensor([list(places)])).logits[:, -1]
            # transformers computes RoPE's cosines in float32, by which keys are moved.
            atol = 1e-5 if kind == "reindex" else 1e-9
            torch.testing.assert_close(logits, truth, rtol=0, atol=atol)
