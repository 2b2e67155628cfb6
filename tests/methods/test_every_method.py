# SPDX-License-Identifier: Apache-2.0
"""Every registered method, on one model: what a method promises whatever it keeps.

All cases come from `kvfold.list_methods()`: a new method is tested with no list edited. Options
that let it work within small budgets are in `tests/helpers/budgets.py`. That it is compiled, or
refused, is in `tests/generation/static/test_decode.py`, where the graphs of all are counted.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import (
    BudgetError,
    CompressedCache,
    generate,
    parse,
)
from kvfold.methods.base import Method
from tests.helpers.budgets import (
    APPENDING,
    COMPRESSING,
    HOLDING,
    METHODS,
    SMALL,
    SPARING,
    UNIFORM,
    compressed,
    encodes,
    merges,
    moves,
)
from tests.helpers.caches import (
    ALONE,
    BATCHES,
    GREEDY,
    OVERSPENDING,
    PADDED,
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
from tests.helpers.cases import EACH
from tests.helpers.exactness import (
    against_truth,
    assert_as_stock,
)
from tests.helpers.models import build, continuation, prompts
from tests.helpers.truth import MOVES, Reader

NAMES = pytest.mark.parametrize("name", kvfold.list_methods())


@NAMES
def test_a_name_gives_a_frozen_dataclass_without_state(name):
    method = parse(name)
    assert type(method) is kvfold.list_methods()[name]
    assert isinstance(method, Method)
    assert name.startswith(method.name)
    field = next(iter(dataclasses.fields(method)), None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(method, field.name if field else "anything", 1)
    assert hash(method) == hash(parse(name))


@NAMES
def test_a_method_is_one_short_file(name):
    path = Path(inspect.getfile(kvfold.list_methods()[name]))
    assert path.parent == Path(kvfold.__file__).parent / "methods"
    assert len(path.read_text().splitlines()) <= 95


@NAMES
def test_a_method_says_what_it_does(name):
    cls = kvfold.list_methods()[name]
    assert cls.summary and cls.summary == inspect.getdoc(cls).splitlines()[0]
    assert cls.paper == "" or cls.paper.startswith("arXiv ")
    assert not cls.takes_budget or parse(name).stages().score is not None


@NAMES
def test_a_method_has_a_formula_that_fits_into_a_terminal(name):
    formula = kvfold.list_methods()[name].formula
    assert formula == inspect.cleandoc(formula)
    assert 0 < max(map(len, formula.splitlines())) <= 90


@NAMES
def test_every_name_survives_its_text(name):
    assert parse(str(parse(name))) == parse(name)


EVERY = pytest.mark.parametrize("spec", METHODS)
COMPRESSES = pytest.mark.parametrize("spec", COMPRESSING)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.cases(10)
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


@pytest.mark.slow
@pytest.mark.cases(10)
@COMPRESSES
def test_generate_of_transformers_equals_ours(model, spec):
    ids, mask = prompts(PADDED)
    ours, theirs = compressed(model, spec), compressed(model, spec)
    options = {"attention_mask": mask, **GREEDY}
    expected = kvfold.generate(model, ids, cache=ours, **options)
    assert torch.equal(model.generate(ids, past_key_values=theirs, **options), expected)
    assert positions(ours) == positions(theirs)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.cases(10)
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
        atol = 4e-6 if getattr(kvfold.parse(spec).stages().merge, "one", None) else 1e-6
        torch.testing.assert_close(got, expected, atol=atol, rtol=0)
    assert positions(reader.cache) == positions(straight.cache)


@pytest.mark.cases(12)
@pytest.mark.slow
@EVERY
def test_two_caches_on_one_model_never_meet(model, spec):
    other = "random" if spec != "random" else "knorm"
    separate = [decode(start(model, s), seed=i) for i, s in enumerate((spec, other))]
    readers = [start(model, s) for s in (spec, other)]
    tokens = [continuation(1, 6, seed).split(1, 1) for seed in (0, 1)]
    for step in range(6):
        for reader, ids, expected in zip(readers, tokens, separate, strict=True):
            assert torch.equal(reader(ids[step]), expected[step])


@pytest.mark.cases(12)
@pytest.mark.slow
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


@pytest.mark.cases(10)
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


@pytest.mark.slow
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
            assert parse(spec).stages().heads or per_head[0] == per_head[1]
        else:
            assert all(total >= expected + generated for total in per_head)


@pytest.mark.slow
@pytest.mark.cases(10)
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


@pytest.mark.slow
@pytest.mark.cases(10)
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


@pytest.mark.cases(10)
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


@COMPRESSES
def test_nothing_is_evicted_while_frozen(model, spec):
    reader = start(model, spec)
    before = positions(reader.cache)
    with reader.cache.frozen():
        reader(continuation(1, 12))
        decode(reader, 3)
    new = list(range(64, 79))
    assert positions(reader.cache) == [[[h + new for h in row] for row in x] for x in before]


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


@pytest.mark.parametrize(("budget", "share"), [(20, None), (21, None), (0.3, 0.3), (0.77, 0.77)])
@pytest.mark.parametrize("spec", [s for s in COMPRESSING if s not in OVERSPENDING])
def test_the_budget_is_spent_exactly(model, spec, budget, share):
    if share and spec.endswith("window=8"):
        share = max(share, 0.4)  # the shortest row chooses one entry beside its window
        budget = share
    cache = start(model, spec, PADDED, budget=budget).cache
    for row, length in enumerate(PADDED):
        expected = 4 * (math.floor(share * length) if share else min(budget, length))
        spent = [sum(layer[row][head] for layer in cache.stats().kept) for head in range(2)]
        assert sum(spent) == 2 * expected
        assert parse(spec).stages().heads or spent[0] == spent[1]
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


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("budget", [1.0, 1000])
@pytest.mark.parametrize("spec", SPARING)
def test_with_budget_to_spare_every_method_is_the_stock_cache(spec, budget, lengths):
    assert_as_stock("llama", spec, budget, lengths, torch.float32)


@pytest.mark.cases(12)
@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("spec", SPARING)
def test_with_budget_to_spare_greedy_tokens_are_stock(spec, lengths):
    ids, mask = prompts(lengths)
    model = build("llama")
    options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(
        generate(model, ids, cache=compressed(model, spec, 1.0), **options), expected
    )


@pytest.mark.slow
@pytest.mark.cases(EACH)
@BATCHES
@pytest.mark.parametrize("spec", APPENDING)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_after_eviction_appending_methods_are_masked_dense(name, spec, lengths):
    move = MOVES[parse(spec).stages().positions]
    off, effect, _ = against_truth(name, spec, lengths, torch.float64, every_step=False, move=move)
    assert off <= (1e-6 if move is None else 2e-5)  # keys are rotated in float32
    assert effect > 1.0


@pytest.mark.slow
@pytest.mark.cases(EACH)
@BATCHES
@pytest.mark.parametrize("spec", [spec for spec in HOLDING if not moves(spec) and not merges(spec)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_evicting_at_every_step_is_masked_dense(name, spec, lengths):
    off, effect, _ = against_truth(name, spec, lengths, torch.float64, every_step=True)
    assert off <= 1e-6
    assert effect > 1.0


@pytest.mark.parametrize("spec", COMPRESSING)
def test_a_missing_budget_is_refused(model, spec):
    with pytest.raises(BudgetError, match="needs a budget"):
        CompressedCache(model, spec)
