# SPDX-License-Identifier: Apache-2.0
"""pages: kept sets beside rounded and ranked ones by hand, logits beside masked dense caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import BudgetError, IllegalComposition, KvfoldError, UnsupportedModel, parse
from kvfold.fitted.of_model import write_fitted
from kvfold.methods.stages.allocate.parts import Curve
from kvfold.methods.stages.allocate.retrieval import RetrievalScores
from kvfold.methods.stages.score.position import recency
from kvfold.methods.stages.when import Rounds
from kvfold.policies import policy
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import ByHand, best
from tests.helpers.caches import ALONE, BATCHES, PADDED, decode, positions, same, start
from tests.helpers.contexts import DOCUMENT, new_model
from tests.helpers.engine import recorded
from tests.helpers.exactness import against_truth
from tests.helpers.models import build, continuation, prompts
from tests.helpers.pages import all_heads, filled, of_row, paged, rounded, whole_beside
from tests.helpers.rounds import assert_each_round
from tests.helpers.scorers import zap_of
from tests.helpers.tokenizers import word_tokenizer

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 96}
SNAPKV = "snapkv:window=8"
BY_LAYER = [
    SNAPKV, f"{SNAPKV} + adakv", "pyramidkv:window=8", "keydiff", "random", "h2o:decode=append",
    "streaming_llm_original:decode=append,positions=original", "knorm:skip_layers=none",
]  # fmt: skip
D2O = "d2o:decode=append,skip_layers=none,spending=exact"


def curve_of(model: Any, path: Path) -> str:
    """The text of curve with random parts of the budget for each head, written to `path`."""
    parts = torch.rand(1, 4, 4, generator=torch.Generator().manual_seed(0))
    curve = Curve(torch.tensor([0.3]), parts)
    write_fitted(path, curve, model, written_by="", target="keydiff", texts=0)
    return f"curve:file={path}"


def ranked(scores: Tensor, forced: Tensor, count: int) -> list[int]:
    """The best of one head: forced entries, then the highest scores, of equal ones the earlier."""
    order = sorted(range(len(scores)), key=lambda t: (not forced[t], -float(scores[t]), t))
    return sorted(order[:count])


# --- kept sets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "rest"), [(3, 1), (8, 0), (13, 12)])
@pytest.mark.parametrize("spec", BY_LAYER)
def test_heads_keep_the_best_entries_of_rounded_sizes(spec, size, rest) -> None:
    model = build("llama", **HEADS)
    whole = recorded(model, prompts(ALONE)[0])
    own = policy(spec).keep(whole, SMALL)
    expected, before = [], torch.arange(64) < 64 - rest
    for scores, counts in zip(own.scores, own.counts.tolist(), strict=True):
        forced = [int((own.forced & before).sum())] * len(counts)
        heads = zip(scores, rounded(counts, forced, size, rest), strict=True)
        expected.append([ranked(each, own.forced | ~before, count) for each, count in heads])
    assert of_row(start(model, paged(spec, size)).cache, 0) == expected
    again = policy(paged(spec, size)).keep(whole, SMALL)
    assert [[head.tolist() for head in layer] for layer in again.indices] == expected
    differ = len({len(head) for layer in expected for head in layer}) > 1
    assert differ != (size == 13 and spec.startswith("streaming"))  # a page of sinks in each


SELECTING = [
    "chunkkv:window=8,length=5", f"{SNAPKV} + adakv + criticalkv", "lagkv:sinks=4,lag=16",
    "criticalkv:window=8", f"{SNAPKV} + chunkwise:length=6",
]  # fmt: skip


@pytest.mark.parametrize("size", [3, 8, 13])
@pytest.mark.parametrize("spec", SELECTING)
def test_heads_that_select_otherwise_keep_pages_of_their_choice(spec, size) -> None:
    """Fewer entries: the best of its choice; more: the best of the others, too."""
    model, rest = build("llama", **HEADS), 64 % size
    whole = recorded(model, prompts(ALONE)[0])
    own = policy(spec).keep(whole, SMALL)
    before, expected = torch.arange(64) < 64 - rest, []
    for scores, indices, counts in zip(own.scores, own.indices, own.counts.tolist(), strict=True):
        forced = [int((own.forced & before).sum())] * len(counts)
        heads = zip(scores, indices, rounded(counts, forced, size, rest), strict=True)
        expected.append([])
        for each, chosen, count in heads:
            first = own.forced | ~before
            order = sorted(
                range(64), key=lambda t: (not first[t], t not in chosen, -float(each[t]), t)
            )
            expected[-1].append(sorted(order[:count]))
    assert of_row(start(model, paged(spec, size), ALONE).cache, 0) == expected


@BATCHES
@pytest.mark.parametrize("spec", [*BY_LAYER, *SELECTING, f"{SNAPKV} + match"])
def test_a_layer_keeps_the_pages_that_its_entries_fill(spec, lengths) -> None:
    model = build("llama", **HEADS)
    own, cache = (start(model, each, lengths).cache for each in (spec, paged(spec, 3)))
    for row, length in enumerate(lengths):  # rests of 1, 2 and 0
        for mine, theirs in zip(of_row(cache, row), of_row(own, row), strict=True):
            forced = max(0, 8 - length % 3) if spec.startswith("pyramidkv") else 0
            assert filled(mine, theirs, 3, length, forced=forced)


@BATCHES
@pytest.mark.parametrize("size", [3, 13])
def test_pages_are_shared_by_all_layers_that_are_sized_together(tmp_path, size, lengths) -> None:
    model = build("llama", **HEADS)
    of_heads = (
        zap_of(model, tmp_path, ",sinks=0,window=0"),
        f"keydiff + {curve_of(model, tmp_path / 'curve.safetensors')}",
    )
    for spec in of_heads if size == 13 else (*of_heads, D2O):
        own, cache = (start(model, each, lengths).cache for each in (spec, paged(spec, size)))
        for row, length in enumerate(lengths):
            mine, theirs = (all_heads(each, row) for each in (cache, own))
            if spec in of_heads:
                wanted = list(map(len, theirs)), [0] * len(mine), size, length % size
                assert list(map(len, mine)) == rounded(*wanted)
            assert filled(mine, theirs, size, length)


@pytest.mark.slow
def test_kvzip_shares_its_pool_in_pages() -> None:
    model, tokenizer = new_model(**HEADS), word_tokenizer()
    everything, own, context = (
        kvfold.compress(model, tokenizer, DOCUMENT, spec, budget, keep_scores=budget == 1.0)
        for spec, budget in (("kvzip", 1.0), ("kvzip", 40), (paged("kvzip", 8), 40))
    )
    opening = int(own.cache.phase.prefix)
    heads = all_heads(own.cache, 0)
    seen = own.cache.get_seq_length()
    sizes = rounded(list(map(len, heads)), [opening] * len(heads), 8, seen % 8)
    scores = torch.cat([state.observers.kept.scores[0] for state in everything.cache.states])
    tokens = torch.arange(seen)
    forced = (tokens < opening) | (tokens >= seen - seen % 8)
    expected = [ranked(row, forced, count) for row, count in zip(scores, sizes, strict=True)]
    assert all_heads(context.cache, 0) == expected
    assert filled(all_heads(context.cache, 0), heads, 8, seen, seen)
    assert len(set(sizes)) > 1


def test_a_row_of_a_batch_keeps_what_it_keeps_alone() -> None:
    model, spec = build("llama", **HEADS), paged(f"{SNAPKV} + adakv", 5)
    batch = start(model, spec, PADDED).cache
    ids, _ = prompts(PADDED)
    for row, length in enumerate(PADDED):
        alone = kvfold.CompressedCache(model, spec, SMALL)
        with torch.no_grad():
            model(ids[row : row + 1, -length:], past_key_values=alone)
        shift = 64 - length
        moved = [[[t - shift for t in head] for head in layer] for layer in of_row(batch, row)]
        assert moved == of_row(alone, 0)


# --- answers ------------------------------------------------------------------------------------


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("spec", [SNAPKV, f"{SNAPKV} + adakv", "pyramidkv:window=8"])
def test_answers_are_those_of_the_kept_entries(spec, lengths) -> None:
    model, each = "llama", paged(spec, 3)
    off, effect, _ = against_truth(model, each, lengths, torch.float64, every_step=False)
    assert off <= 1e-6 and effect > 1e-3


@pytest.mark.slow
@BATCHES
def test_heads_without_a_page_answer_by_what_comes(tmp_path, lengths) -> None:
    model = build("llama", torch.float64)
    spec = paged(zap_of(model, tmp_path, ",sinks=0,window=0"), 8)
    cache = start(model, spec, lengths).cache
    assert any(not head for row in range(len(lengths)) for head in all_heads(cache, row))
    off, effect, _ = against_truth("llama", spec, lengths, torch.float64, every_step=False)
    assert off <= 1e-6 and effect > 1e-3


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("behind", ["", " + adakv"])
def test_answers_in_rounds_are_those_of_the_kept_entries(behind, lengths) -> None:
    spec = paged(f"{SNAPKV}{behind} + every:interval=3", 3)
    off, _, _ = against_truth("llama", spec, lengths, torch.float64, every_step=True)
    assert off <= 1e-6


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize(
    "spec",
    [
        f"{SNAPKV} + merge", f"{SNAPKV} + adakv + merge", D2O, f"{SNAPKV} + match",
        f"{SNAPKV} + adakv + kivi:group=8,residual=8", f"{SNAPKV} + think:queries=8,recent=8",
        "rkv:window=8", "knorm:skip_layers=none + reindex", "triattention:prompt=counted", 
        f"{SNAPKV} + every:interval=3,sizes=again + adakv",
        "simlayerkv:window=8", "dbudgetkv", "auto:window=8",
    ],
)  # fmt: skip
def test_pages_of_one_entry_change_nothing(spec, lengths) -> None:
    """Merged, refitted and encoded entries among them, and sizes without a budget."""
    model = build("llama", torch.float64)
    own, cache = start(model, spec, lengths), start(model, paged(spec, 1), lengths)
    for _ in range(2):
        assert all(map(torch.allclose, decode(cache), decode(own)))
        assert positions(cache.cache) == positions(own.cache)


# --- rounds -------------------------------------------------------------------------------------


@pytest.mark.slow
@BATCHES
def test_rounds_keep_the_best_of_each_head_by_hand(lengths) -> None:
    SIZES = [(21, 18), (19, 19), (20, 20)]  # by the rest: 20 entries of 2 heads, in pages of 3

    def round_of(one: ByHand) -> None:
        for layer in one.layers:
            if any(len(head) > SMALL for head in layer.heads):
                rest = (max(layer.heads[0].positions) + 1) % 3
                for head, count in zip(layer.heads, SIZES[rest], strict=True):
                    unit = head.keys / head.keys.norm(dim=-1, keepdim=True)
                    scores = -(unit @ unit.mean(0))
                    scores[len(head) - rest :] = torch.inf
                    head.keep(best(scores, count))

    assert_each_round(paged("keydiff + every:interval=4", 3), round_of, lengths, 4)


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("prompt", ["counted", "kept"])
@pytest.mark.parametrize("sizes", ["", " + adakv"])
def test_each_round_ends_with_whole_pages(sizes, prompt, lengths) -> None:
    model = build("llama", **HEADS)
    spec = f"{SNAPKV}{sizes} + every:interval=6,prompt={prompt}"
    own, cache = start(model, spec, lengths), start(model, paged(spec, 5), lengths)
    for step, token in enumerate(continuation(len(lengths), 30).split(1, 1), 1):
        own(token)
        cache(token)
        for row, length in enumerate(lengths):
            for mine, theirs in zip(of_row(cache.cache, row), of_row(own.cache, row), strict=True):
                assert whole_beside(mine, 5, length + step, 64 + step)
                if step % 6 == 0 and (prompt == "counted" or step >= 24):
                    assert filled(mine, theirs, 5, length + step, 64 + step)


@pytest.mark.slow
def test_sizes_of_all_layers_hold_in_rounds(tmp_path) -> None:
    model = build("llama", **HEADS)
    zap = zap_of(model, tmp_path, ",sinks=0,window=3")
    own, cache = (
        start(model, f"{zap} + every:interval=4{more}") for more in ("", " + pages:size=3")
    )
    for seen in (68, 72, 76):  # rests of 2, 0 and 1
        decode(own, 4), decode(cache, 4)
        assert filled(all_heads(cache.cache, 0), all_heads(own.cache, 0), 3, seen, seen)


# --- contexts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["kvzip", SNAPKV, f"{SNAPKV} + kivi:group=8,residual=8"])
def test_contexts_are_stored_and_read_on_in_pages(tmp_path, spec) -> None:
    model, tokenizer = new_model(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, DOCUMENT, paged(spec, 16), 40)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    assert positions(loaded.cache) == positions(context.cache)
    assert loaded.ask("the sky is", max_new_tokens=4) == context.ask("the sky is", max_new_tokens=4)
    longer = context.append(" " + DOCUMENT) if "kvzip" not in spec else context
    seen = longer.cache.get_seq_length()
    assert whole_beside(all_heads(longer.cache, 0), 16, seen, seen)


# --- what fits, and what does not ---------------------------------------------------------------


def test_a_budget_that_holds_all_evicts_nothing() -> None:
    model = build("llama")
    for budget in (1.0, 64, 100):
        cache, full = start(model, paged(SNAPKV, 7), budget=budget), start(model, "full")
        assert positions(cache.cache) == positions(full.cache)
        assert same(decode(cache), decode(full))


@pytest.mark.parametrize("spec", ["keydiff", "keydiff + every:interval=4", "zap"])
def test_less_than_a_page_for_each_layer_is_refused(tmp_path, spec) -> None:
    model = build("llama")
    spec = spec.replace("zap", zap_of(model, tmp_path, ",sinks=0,window=0"))
    with pytest.raises(BudgetError, match="a page each at least: raise the budget"):
        start(model, paged(spec, 41))
    assert start(model, paged(spec, 40)).cache.stats().forced_over_budget  # beside a rest of 24
    with pytest.raises(BudgetError, match="fill 0 pages of 32"):
        start(model, paged("keydiff", 32), budget=15)
    assert not start(model, paged("keydiff", 32), budget=16).cache.stats().forced_over_budget


def test_heads_of_latents_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="latents, one for all heads"):
        start(build("deepseek_v3"), paged(SNAPKV, 4))


def test_layers_and_heads_that_stay_whole_are_refused(tmp_path) -> None:
    model, path = build("llama"), tmp_path / "heads.safetensors"
    scores = RetrievalScores(torch.rand(4, 2))
    write_fitted(path, scores, model, written_by="", target="duo", texts=0)
    d2o, duo = "d2o_official:decode=append", f"duo:file={path},sinks=2,recent=4"
    for spec in (d2o, f"{d2o} + every:interval=4,prompt=kept", duo, f"{duo} + every:interval=4"):
        with pytest.raises(KvfoldError, match="some layers or heads whole"):
            decode(start(model, paged(spec, 4)), 4)


REFUSED = [
    ("pages", "compose it with a method that does"),
    ("kivi + pages", "compose it with a method that does"),
    ("pyramidinfer + pages", "compose it with a method that does"),
    ("h2o + pages", "evicts one for each generated token: choose decode=append"),
    ("tova + pages", "evicts one for each generated token"),
    ("cam + pages", "evicts one for each generated token"),
    ("pages + full", "compose it with a method that does"),
    ("snapkv + level + pages", "both bring the shape stage"),
    ("snapkv + pages + recall", "recall keeps every entry"),
    ("triattention:scope=model + pages", "both bring the shape stage"),
    ("streaming_llm:decode=append + pages", "re-indexed"),
    ("streaming_llm_original:decode=append + minicache + pages", "all their heads must keep"),
]


@pytest.mark.parametrize(("spec", "why"), REFUSED)
def test_methods_that_leave_parts_of_pages_are_refused(spec, why) -> None:
    with pytest.raises(IllegalComposition, match=why):
        parse(spec).stages()


def test_what_it_says_of_itself() -> None:
    with pytest.raises(KvfoldError, match="at least 1 entry"):
        parse("snapkv + pages:size=0")
    made: Any = parse("snapkv + pages:size=16")
    assert made.stages().inexact.startswith("heads keep whole pages of 16 entries beside")
    assert made.takes_budget and not made.by_head


def test_the_name_of_before_is_taken_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="shape='votes'"):
        assert kvfold.Stages(level="votes") == kvfold.Stages(shape="votes")
    with pytest.warns(DeprecationWarning, match="shape='best'"):
        given = {"score": recency, "when": Rounds(8)}
        assert kvfold.Stages(**given, agree=True) == kvfold.Stages(**given, shape="best")
