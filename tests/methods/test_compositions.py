# SPDX-License-Identifier: Apache-2.0
"""Methods together: each part keeps its promise, and what cannot go together is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import (
    BudgetError,
    CompressedCache,
    IllegalComposition,
    KvfoldError,
    UnsupportedModel,
    parse,
)
from kvfold.cache.barrier import Queue
from kvfold.methods.stages.when import Hold
from tests.helpers.budgets import SMALL, needs_driver
from tests.helpers.by_hand import (
    ALONE,
    BATCHES,
    HEADS,
    LAYERS,
    QUERY_HEADS,
    SHAPES,
    Head,
    adaptive,
    assert_prefill,
    best,
    distinct_prompts,
    model_with,
    newest,
    prompt_read,
    read_by_kvfold,
)
from tests.helpers.caches import positions
from tests.helpers.compositions import both, each_head, entries, given
from tests.helpers.models import build
from tests.helpers.models import continuation as steps_of
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader

GROUP = RECENT = 8
KIVI = f"kivi:group={GROUP},residual={RECENT}"
THINK = f"think:recent={RECENT},queries=8,ratio=0.4"
MINICACHE = "minicache:block=8"
SNAPKV, PYRAMIDKV = "snapkv:window=8", "pyramidkv:window=8"
STREAMING = "streaming_llm_original:decode=append"
LAZY = "simlayerkv:window=8,threshold=0.24"
LEGAL = [
    f"{SNAPKV} + {KIVI}",
    f"{LAZY} + {KIVI}",
    f"{PYRAMIDKV} + adakv:window=8",
    "h2o + merge:rule=d2o",
    "h2o + merge:rule=cam",
    f"{SNAPKV} + every",
    "h2o:decode=append + adakv",
    f"{SNAPKV} + {THINK}",
    f"{STREAMING} + {KIVI}",
    f"{STREAMING} + {MINICACHE}",
    f"{MINICACHE} + {STREAMING}",
    f"{PYRAMIDKV} + adakv + {KIVI}",
    "d2o:decode=append + adakv",
    "knorm:skip_layers=0 + cam:deterministic=true",
    f"kvzip + {KIVI}",
    f"{LAZY} + {SNAPKV}",
    f"{SNAPKV} + {LAZY} + {KIVI}",
]


@BATCHES
@pytest.mark.parametrize(
    ("spec", "budget"),
    [
        ("d2o_official", 0.3),
        ("d2o:similarity=independent", SMALL),
        (f"{LAZY} + {SNAPKV}", None),
        (f"{LAZY},when=first_decode + {KIVI}", None),
    ],
)
def test_a_prompt_read_in_pieces_is_compressed_as_if_read_at_once(spec, budget, lengths):
    (ids, mask), model = distinct_prompts(lengths), model_with(2, "kvfold")
    caches = [CompressedCache(model, spec, budget) for _ in range(2)]
    outs = [
        kvfold.generate(
            model, ids, cache=cache, attention_mask=mask, prefill_chunk=chunk, max_new_tokens=4
        )
        for cache, chunk in zip(caches, (None, 23), strict=True)
    ]
    assert torch.equal(*outs)
    assert positions(caches[0]) == positions(caches[1])


@pytest.mark.parametrize("spec", [*kvfold.list_methods(), *LEGAL])
def test_every_text_of_a_method_is_read_back(spec):
    method = parse(spec)
    assert parse(str(method)) == method
    assert str(parse(str(method))) == str(method)


@pytest.mark.parametrize("spec", LEGAL)
def test_compositions_compress_and_go_on(spec):
    """A padded prompt, generated tokens, and a second turn; the budget of a part holds."""
    model = model_with(2, "kvfold")
    ids, mask = distinct_prompts((64, 53, 24))
    tokenizer = word_tokenizer() if needs_driver(spec) else None
    cache = CompressedCache(model, spec, given(spec), tokenizer=tokenizer)
    options = {"cache": cache, "max_new_tokens": 4, "do_sample": False}
    text = kvfold.generate(model, ids, attention_mask=mask, **options)
    stats = cache.stats()
    assert stats.seen == 67 and stats.kv_bytes < stats.nbytes_full
    assert parse(stats.method) == parse(spec)
    if parse(spec).takes_budget:
        # Tokens that came after the compression: generated ones, and with a driver the last read.
        later = 0 if isinstance(parse(spec).stages().when, Hold) else 3 + needs_driver(spec)
        for row in range(3):
            spent = sum(n for layer in stats.kept for n in layer[row])
            assert spent == LAYERS * 2 * (SMALL + later)
    assert any(len(cache.positions(i)[0][0]) < 64 for i in range(LAYERS))
    text = torch.cat([text, steps_of(3, 12)], 1)
    seen = torch.cat([mask, torch.ones(3, 16, dtype=torch.long)], 1)
    out = kvfold.generate(model, text, attention_mask=seen, **options)
    assert out.shape == (3, 84) and cache.stats().seen == 83


def packed(numbers: Tensor, bits: int) -> Tensor:
    """One group, restored from its codes."""
    low, high = float(numbers.min()), float(numbers.max())
    step = (high - low) / (2**bits - 1)
    codes = [round((float(x) - low) / step) if step else 0 for x in numbers]
    return torch.tensor([code * step + low for code in codes], dtype=numbers.dtype)


def kivi(keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys in groups of tokens of a channel, values in groups of channels of a token."""
    keys, values = keys.clone(), values.clone()
    for start in range(0, len(keys) - len(keys) % RECENT, GROUP):
        for channel in range(keys.shape[1]):
            column = keys[start : start + GROUP, channel]
            column.copy_(packed(column, bits))
    for token in range(len(values) - RECENT):
        for start in range(0, values.shape[1], GROUP):
            row = values[token, start : start + GROUP]
            row.copy_(packed(row, bits))
    return keys, values


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("selecting", [SNAPKV, LAZY, STREAMING, f"{PYRAMIDKV} + adakv:window=8"])
def test_what_is_selected_is_what_is_packed(selecting, bits, lengths):
    plain, quantized = both(selecting, f"{KIVI},bits={bits}", 2, lengths)
    assert positions(quantized.cache) == positions(plain.cache)
    kept = {n for layer in plain.cache.stats().kept for row in layer for n in row}
    assert min(kept) < 24 and (max(kept) == 64) == (selecting == LAZY)
    for at in each_head(plain.cache):
        expected = kivi(*entries(plain.cache, *at), bits)
        for got, want in zip(entries(quantized.cache, *at), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    # bits + 2 · 64 / 8 instead of 64 bits a number, but for the newest entries.
    assert quantized.cache.stats().kv_bytes < 0.8 * plain.cache.stats().kv_bytes
    for token in steps_of(len(lengths), 10).split(1, 1):
        plain(token), quantized(token)
    assert positions(quantized.cache) == positions(plain.cache)


@BATCHES
def test_lazy_layers_are_trimmed_at_the_first_token_and_all_are_packed(lengths):
    """The paper's main setting with 4 bits: nothing changes until a token is generated."""
    selecting = "simlayerkv:window=8,threshold=0.2,when=first_decode"
    plain, quantized = both(selecting, f"{KIVI},bits=4", 2, lengths)
    tokens = steps_of(len(lengths), 12).split(1, 1)
    for index in each_head(plain.cache):
        for got, want in zip(
            entries(quantized.cache, *index), entries(plain.cache, *index), strict=True
        ):
            assert torch.equal(got, want)
    plain(tokens[0]), quantized(tokens[0])
    kept = {n for layer in plain.cache.stats().kept for row in layer for n in row}
    assert min(kept) == 12 and max(kept) == 65
    assert positions(quantized.cache) == positions(plain.cache)
    for index in each_head(plain.cache):
        expected = kivi(*entries(plain.cache, *index), 4)
        for got, want in zip(entries(quantized.cache, *index), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    for token in tokens[1:]:
        plain(token), quantized(token)
    assert positions(quantized.cache) == positions(plain.cache)


@HEADS
def test_what_is_selected_loses_channels(heads):
    plain, pruned = both(SNAPKV, THINK, heads, ALONE)
    assert positions(pruned.cache) == positions(plain.cache)
    read = prompt_read(heads, ALONE, 0).layers
    for layer, row, head in each_head(plain.cache):
        keys, values = entries(plain.cache, layer, row, head)
        left, untouched = entries(pruned.cache, layer, row, head)
        assert torch.equal(untouched, values)
        group = QUERY_HEADS[heads] // heads
        queries = read[layer].query[head * group : (head + 1) * group, -8:]
        scores = queries.square().mean((0, 1)) * keys.square().mean(0)
        kept = sorted(best(scores, 8 - int(0.4 * 8)))
        expected = keys.clone()
        for channel in set(range(8)) - set(kept):
            expected[:-RECENT, channel] = 0.0
        assert torch.equal(left, expected)
        assert not torch.equal(left, keys)
    # 12 of 20 keys lose 3 of 8 channels.
    saved = 12 * 3 * 8 * heads * LAYERS
    channels = 5 * 4 * heads * LAYERS
    bytes_of = [reader.cache.stats() for reader in (plain, pruned)]
    assert bytes_of[0].kv_bytes - bytes_of[1].kv_bytes == saved - channels


@BATCHES
@pytest.mark.parametrize("budget", [SMALL, 0.5, "21000B", "63000B"])
def test_what_is_kept_by_position_is_paired(budget, lengths):
    plain, paired = (
        read_by_kvfold(spec, budget, 2, lengths)
        for spec in (STREAMING, f"{STREAMING} + {MINICACHE}")
    )
    if not isinstance(budget, str):
        assert positions(paired.cache) == positions(plain.cache)
    for upper in (2, 3):
        assert positions(paired.cache)[upper] == positions(paired.cache)[2]
    for at in each_head(paired.cache):
        found = paired.cache.positions(at[0])[at[1]][at[2]].tolist()
        there = plain.cache.positions(at[0])[at[1]][at[2]].tolist()
        common = [there.index(place) for place in found]
        pairs = zip(entries(paired.cache, *at), entries(plain.cache, *at), strict=True)
        for got, want in pairs:
            want = want[common]
            if at[0] < LAYERS // 2:
                assert torch.equal(got, want)
            else:
                torch.testing.assert_close(got.norm(dim=-1), want.norm(dim=-1))
                assert not torch.allclose(got, want)
    if isinstance(budget, str):
        stats = paired.cache.stats()
        size = 8 * 2 * 8 + 4
        assert sum(n for x in stats.kept for row in x for n in row) * size <= int(budget[:-1])


@SHAPES
def test_heavy_hitters_are_shared_among_heads(heads, lengths):
    def keep(layers: list[Any]) -> list[list[list[int]]]:
        kept = []
        for layer in layers:
            counts = adaptive([h.sums[:-10].tolist() for h in layer.heads], SMALL - 10, 0.2)
            kept.append([chosen(h, n) for h, n in zip(layer.heads, counts, strict=True)])
        return kept

    def chosen(head: Head, count: int) -> list[int]:
        return best(head.sums[:-10], count) + newest(head, 10)

    held = assert_prefill("h2o:decode=append + adakv", SMALL, heads, lengths, keep)
    if heads > 1:
        assert len({n for layer in held.stats().kept for n in layer[0]}) > 2


def test_a_part_that_only_shares_or_saves_brings_no_budget():
    """SimLayerKV and DBudgetKV size the layers, whatever AdaKV and CaM would take alone."""
    model = model_with(2, "kvfold")
    for spec in (f"{LAZY} + cam", "dbudgetkv + adakv"):
        CompressedCache(model, spec)
        with pytest.raises(BudgetError, match="takes no budget"):
            CompressedCache(model, spec, SMALL)
    for spec in (f"{KIVI} + adakv:window=8", "h2o + cam"):
        CompressedCache(model, spec, SMALL)
        with pytest.raises(BudgetError, match="needs a budget"):
            CompressedCache(model, spec)


EVICTS_LATER = r"encoded entries cannot be evicted.*choose decode=append"
MOVES = r"re-indexed positions.*choose positions=.original"
NOT_A_PAIR = r"stored as a pair.*same entries.*choose one that goes by position"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"h2o + {KIVI}", EVICTS_LATER),
        (f"tova + {KIVI}", EVICTS_LATER),
        (f"cam + {KIVI}", EVICTS_LATER),
        (f"{LAZY},when=first_decode + {SNAPKV}", r"that token alone, and 8 queries are needed"),
        (f"{LAZY} + h2o", r"without a budget.*none to hold.*choose decode=append"),
        (f"{LAZY} + {PYRAMIDKV}", r"both bring the allocate stage: choose one"),
        (f"{LAZY} + {LAZY}", r"both bring the needs? stage|both bring the allocate stage"),
        ("streaming_llm + think", EVICTS_LATER),
        ("streaming_llm + kivi", EVICTS_LATER),
        ("streaming_llm:decode=append + think", MOVES),
        ("streaming_llm:decode=append + kivi", MOVES),
        ("streaming_llm:decode=append + adakv", MOVES),
        ("streaming_llm + adakv", r"budgets per head.*choose decode=append"),
        ("h2o + adakv", r"budgets per head.*choose decode=append"),
        ("kivi + think", r"kivi and think both bring the encode stage: choose one"),
        ("minicache + kivi", r"both bring the encode stage: choose one"),
        ("snapkv + h2o", r"both bring the score stage: choose one"),
        ("kvzip + snapkv", r"kvzip and snapkv both bring the score stage: choose one"),
        ("kvzip + adakv", r"size of its own already: leave out one"),
        ("kvzip:level=head + adakv", r"size of its own already: leave out one"),
        ("auto + adakv", r"size of its own already: leave out one"),
        (f"snapkv + {MINICACHE}", NOT_A_PAIR),
        (f"{MINICACHE} + snapkv", NOT_A_PAIR),
        (f"pyramidkv + {MINICACHE}", NOT_A_PAIR),
        (f"random + {MINICACHE}", NOT_A_PAIR),
        (f"{LAZY} + {MINICACHE}", NOT_A_PAIR),
        (f"auto + {MINICACHE}", NOT_A_PAIR),
        (f"kvzip + {MINICACHE}", NOT_A_PAIR),
        (f"{STREAMING} + adakv + {MINICACHE}", NOT_A_PAIR),
        (f"adakv + {MINICACHE}", NOT_A_PAIR),
        ("pyramidinfer + snapkv", r"pruned between the layers.*use that method alone"),
        ("pyramidinfer + kivi", r"pruned between the layers.*use that method alone"),
        ("pyramidinfer + minicache", r"pruned between the layers.*use that method alone"),
        ("pyramidinfer + adakv", r"pruned between the layers.*use that method alone"),
        ("merge", r"evicts nothing itself: compose it with a method that does"),
        ("full + merge:rule=cam", r"evicts nothing itself: compose it with a method that does"),
        ("kivi + merge", r"evicts nothing itself: compose it with a method that does"),
        ("d2o + merge", r"both bring the merge stage: choose one"),
        ("adakv + adakv", r"both bring the heads stage: choose one"),
    ],
)
def test_what_does_not_go_together_is_refused(spec, message):
    model = model_with(2, "kvfold")
    with pytest.raises(IllegalComposition, match=message):
        CompressedCache(model, spec, tokenizer=word_tokenizer())
    with pytest.raises(IllegalComposition, match=message):
        parse(spec).stages()


@pytest.mark.parametrize(
    "name", ["simlayerkv", "dbudgetkv", "auto", "kivi", "think", "minicache", "pyramidinfer"]
)
@pytest.mark.parametrize("budget", [SMALL, 0.5, "1MiB"])
def test_a_budget_for_a_method_without_one_is_refused(name, budget):
    with pytest.raises(BudgetError, match=rf"{name} takes no budget: leave it out"):
        CompressedCache(model_with(2, "kvfold"), name, budget)


@pytest.mark.parametrize("spec", ["adakv", "d2o", "cam", "roco", "kvzip", f"{SNAPKV} + {KIVI}"])
def test_a_budget_that_is_missing_is_refused(spec):
    with pytest.raises(BudgetError, match=r"needs a budget: the part to keep \(0.2\), tokens"):
        CompressedCache(model_with(2, "kvfold"), spec, tokenizer=word_tokenizer())


def test_kvzip_without_a_tokenizer_is_refused():
    for spec in ("kvzip", f"kvzip + {KIVI}"):
        with pytest.raises(KvfoldError, match=r"repeat the text.*give the cache tokenizer="):
            CompressedCache(model_with(2, "kvfold"), spec, SMALL)


@pytest.mark.parametrize(("spec", "budget"), [("kvzip", SMALL), ("pyramidinfer", None)])
def test_forwards_of_its_own_are_not_run_by_the_bare_model(spec, budget):
    model, ids = model_with(2, "kvfold"), distinct_prompts(ALONE)[0]
    message = r"forwards of its own.*kvfold\.compress or kvfold\.generate.*tokenizer="
    for run in (
        lambda cache: model(ids, past_key_values=cache),
        lambda cache: model.generate(ids, past_key_values=cache, max_new_tokens=2),
    ):
        cache = CompressedCache(model, spec, budget, tokenizer=word_tokenizer())
        with pytest.raises(KvfoldError, match=message):
            run(cache)


@pytest.mark.parametrize("name", ["gemma3", "gpt_neox"])
def test_pyramidinfer_is_refused_where_layers_cannot_be_run_one_by_one(name):
    model, ids = build(name), distinct_prompts(ALONE)[0]
    cache = CompressedCache(model, "pyramidinfer")
    refusal = rf"(?i){name.replace('_', '')}.*one by one.*between"
    with pytest.raises(UnsupportedModel, match=refusal):
        kvfold.generate(model, ids, cache=cache, max_new_tokens=2)
    # Nothing was left behind: other caches of this model work.
    other = CompressedCache(model, SNAPKV, SMALL)
    kvfold.generate(model, ids, cache=other, max_new_tokens=2, do_sample=False)
    assert {n for layer in other.stats().kept for n in layer[0]} == {SMALL + 1}


def test_compressing_a_document_at_the_first_generated_token_is_refused():
    model = build("llama")
    with pytest.raises(KvfoldError, match=r"first generated token.*choose a variant"):
        kvfold.compress(model, word_tokenizer(), "the grass is green", f"{LAZY},when=first_decode")


def test_whole_layers_beyond_the_budget_are_refused_and_harm_no_other_cache():
    model, ids = model_with(2, "kvfold"), distinct_prompts(ALONE)[0]
    before = Reader(model, CompressedCache(model, "d2o", SMALL))(ids)
    # Three of four layers stay whole: 3 · 64 of 4 · 47.
    cache = CompressedCache(model, "d2o:skip_layers=0/1/-1", 47)
    with pytest.raises(BudgetError, match=r"192 entries.*budget is 188.*skip fewer layers"):
        Reader(model, cache)(ids)
    again = Reader(model, CompressedCache(model, "d2o", SMALL))
    assert torch.equal(again(ids), before)
    Reader(model, CompressedCache(model, "d2o:skip_layers=0/1/-1", 49))(ids)


@pytest.mark.parametrize("group", [16, 24])
def test_groups_that_do_not_fill_the_head_are_refused(group):
    model = model_with(2, "kvfold")
    cache = CompressedCache(model, f"kivi:group={group},residual={group}")
    message = rf"groups of {group} channels do not fill.*head size 8: choose a group that divides 8"
    with pytest.raises(KvfoldError, match=message):
        Reader(model, cache)(distinct_prompts(ALONE)[0])


@torch.no_grad()
def test_layers_that_wait_for_the_others_do_not_keep_the_prompt_s_queries(monkeypatch):
    held = []
    arrive = Queue.arrive

    def watched(queue, due, all_of):
        held.append(due[1].queries)
        return arrive(queue, due, all_of)

    monkeypatch.setattr(Queue, "arrive", watched)
    model = build("llama")
    cache = kvfold.CompressedCache(model, "d2o", 0.3)
    model(torch.randint(5, 190, (1, 60)), past_key_values=cache)
    assert held and all(q.untyped_storage().nbytes() == q.nbytes for q in held)
