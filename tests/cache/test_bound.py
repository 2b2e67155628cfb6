# SPDX-License-Identifier: Apache-2.0
"""max_cache_tokens: entries counted at every step, what rounds and budgets come out, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvfold
from kvfold import BudgetError, CompressedCache, KvfoldError
from kvfold.cache.layer import CompressedLayer
from tests.helpers.budgets import COMPRESSING
from tests.helpers.caches import GREEDY, PADDED, decode, kept, positions
from tests.helpers.longrope import assists
from tests.helpers.models import build, prompts
from tests.helpers.truth import Reader

MOST = 28
# They keep another number of entries than their budget
UNBOUNDED = ["pyramidkv_official:window=8"]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama", torch.float64)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Entries `[L·B·H]` that the last forward's tokens attended to, own ones included."""
    counts: list[int] = []
    attend = CompressedLayer.attend

    def counting(layer: CompressedLayer, *args: Any, **given: Any) -> Any:
        if layer.state.plan.layer == 0:
            counts.clear()
        counts.extend((layer.state.columns() >= 0).sum(-1).flatten().tolist())
        return attend(layer, *args, **given)

    monkeypatch.setattr(CompressedLayer, "attend", counting)
    yield counts


def most_of_a_row(counts: list[int], rows: int, layers: int) -> float:
    """Mean over layers and heads, of the row that has most."""
    of_rows = torch.tensor(counts).view(layers, rows, -1).double().mean((0, 2))
    return float(of_rows.max())


def stored_on_average(cache: CompressedCache) -> int:
    counts = stored(cache)
    return sum(counts) // len(counts)


def stored(cache: CompressedCache) -> list[int]:
    layers = range(len(cache.states))
    return [len(head) for i in layers for row in cache.positions(i) for head in row]


BOUNDED = [spec for spec in COMPRESSING if spec not in UNBOUNDED]
BOUNDED += ["snapkv:window=8 + adakv", "knorm + turboquant:residual=8,sinks=2,end_layers=0"]
BOUNDED += ["keydiff + reindex", "keydiff + match:references=text"]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("lengths", [PADDED, (9,)], ids=["padded", "short"])
@pytest.mark.parametrize("spec", BOUNDED)
def test_no_step_attends_to_more(model, attended, spec, lengths):
    ids, mask = prompts(lengths)
    every = 5 if bool(kvfold.parse(spec).stages().rounds) else None
    cache = CompressedCache(model, spec, every=every, max_cache_tokens=MOST)
    reader = Reader(model, cache, mask if len(lengths) > 1 else None)
    reader(ids)
    found = []
    for _ in range(30):
        decode(reader, 1)
        found.append(most_of_a_row(attended, len(lengths), len(cache.states)))
        assert most_of_a_row(stored(cache), len(lengths), len(cache.states)) <= MOST
    assert max(found) == MOST  # as much as there is room for, and no more


@pytest.mark.parametrize(
    ("spec", "given", "text", "size"),
    [
        ("knorm", {}, "knorm + every", 872),
        ("knorm", {"every": 10}, "knorm + every:interval=10", 990),
        ("knorm", {"budget": 900}, "knorm + every:interval=100", 900),
        ("knorm", {"budget": 500}, "knorm + every", 500),
        ("knorm", {"budget": "500", "every": 500}, "knorm + every:interval=500", 500),
        ("rkv", {}, "rkv", 872),
        ("rkv", {"every": 64}, "rkv + every:interval=64", 936),
        ("triattention:prompt=counted", {}, "triattention:prompt=counted", 872),
        ("h2o", {}, "h2o", 999),
        ("tova", {"budget": 300}, "tova", 300),
        ("snapkv + adakv", {}, "snapkv + adakv + every", 872),
    ],
)
def test_rounds_and_budgets_that_fit(model, spec, given, text, size):
    cache = CompressedCache(model, spec, max_cache_tokens=1000, **given)
    assert (str(cache.method), cache.budget) == (text, kvfold.Budget.tokens(size))
    without = CompressedCache(model, text, size)
    assert cache.method == without.method


def test_a_small_bound_is_half_rounds(model):
    cache = CompressedCache(model, "knorm", max_cache_tokens=15)
    assert str(cache.method) == "knorm + every:interval=7" and cache.budget.amount == 8


@pytest.mark.parametrize(
    ("spec", "given", "reason"),
    [
        ("full", {}, "takes no budget"),
        ("kivi", {}, "takes no budget"),
        ("zap_threshold", {}, "takes no budget"),
        ("kvzip", {}, "cannot keep to max_cache_tokens=40: forwards of its own"),
        ("snapkv:window=8 + kivi", {}, "cannot keep to max_cache_tokens=40: encoded entries"),
        ("pyramidkv_official:window=8", {}, "cannot keep to max_cache_tokens=40, nor to a budget"),
        ("adakv:window=8,rule=blend", {}, "cannot keep to max_cache_tokens=40, nor to a budget"),
        ("duo", {}, "heads keep everything"),
        ("triattention", {}, "choose prompt=counted"),
        ("knorm + every:prompt=kept", {}, "choose prompt=counted"),
        ("knorm", {"budget": 0.5}, "a budget of 0.5 of the tokens seen is not a number"),
        ("knorm", {"budget": "1MiB"}, "a budget of 1048576 bytes is not a number"),
        ("knorm", {"budget": 40}, "grows to 41 entries until the next eviction"),
        ("h2o", {"budget": 40}, "grows to 41 entries until the next eviction"),
        ("knorm", {"budget": 30, "every": 11}, "grows to 41 entries"),
        ("rkv", {}, "leaves 0 entries between evictions after every 128 tokens"),
        ("snapkv:window=32", {}, "leaves 20 entries .* always keeps 32"),
        ("h2o", {"every": 4}, "both bring the decode stage"),
    ],
)
def test_what_cannot_be_bounded_is_refused_in_one_line(model, spec, given, reason):
    with pytest.raises(KvfoldError, match=reason) as refused:
        CompressedCache(model, spec, max_cache_tokens=40, **given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("most", [0, 1, -3, 2.5, True, "40"])
def test_a_bound_that_is_no_number_of_entries_is_refused(model, most):
    with pytest.raises(KvfoldError, match="max_cache_tokens is at least 2 entries"):
        CompressedCache(model, "knorm", max_cache_tokens=most)


def test_protected_spans_are_part_of_the_bound(model):
    with pytest.raises(BudgetError, match="always keeps 30 entries"):
        CompressedCache(model, "knorm", max_cache_tokens=40, protect=[(0, 30)])


@assists
@pytest.mark.parametrize("spec", ["h2o", "knorm"])
def test_assisted_decoding_has_no_bound_and_is_refused(model, spec):
    cache = CompressedCache(model, spec, max_cache_tokens=40)
    with pytest.raises(KvfoldError, match="max_cache_tokens=40 bounds the answer"):
        kvfold.generate(model, prompts((64,))[0], cache=cache, prompt_lookup_num_tokens=3, **GREEDY)
    assert cache.get_seq_length() == 0


@pytest.mark.slow
def test_an_enabled_model_is_bounded(model):
    ids = prompts((64,))[0]
    options = {"do_sample": False, "max_new_tokens": 30, "return_dict_in_generate": True}
    with kvfold.enable(model, "knorm", max_cache_tokens=MOST):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert max(kept(out.past_key_values)) <= MOST


@pytest.mark.parametrize("generated", [0, 3, 8])
@pytest.mark.parametrize("spec", ["knorm", "adakv:window=8", "streaming_llm", "tova"])
def test_what_an_edit_puts_in_leaves_room_until_the_next_eviction(model, attended, spec, generated):
    every = 8 if spec in ("knorm", "adakv:window=8") else None  # the others hold their size
    cache = CompressedCache(model, spec, max_cache_tokens=MOST, every=every)
    reader = Reader(model, cache)
    reader(prompts((64,))[0])
    decode(reader, generated + 1)
    newest = cache.get_seq_length() - 1
    span, before = (newest, newest + 1), positions(cache)
    left = every - 1 - generated % every if every else 1
    room = MOST - stored_on_average(cache) - left
    with pytest.raises(KvfoldError, match=f"next eviction, max_cache_tokens is {MOST}: replace"):
        cache.replace(span, torch.full((1, room + 2), 5))
    assert positions(cache) == before
    cache.replace(span, torch.full((1, room + 1), 5))
    found = []
    for _ in range(left + 2):
        decode(reader, 1)
        found.append(most_of_a_row(attended, 1, len(cache.states)))
    assert max(found) == MOST


def test_another_budget_or_method_of_the_same_reading_is_bounded_too(model):
    cache = CompressedCache(model, "snapkv:window=8", max_cache_tokens=MOST)
    with cache.reading(), torch.no_grad():
        model(prompts((64,))[0], past_key_values=cache)
        smaller, other = cache.to_budget(10), cache.to_budget(None, "knorm")
        with pytest.raises(BudgetError, match=f"max_cache_tokens is {MOST}"):
            cache.to_budget(MOST)
        with pytest.raises(KvfoldError, match="takes no budget"):
            cache.to_budget(None, "full")
    assert str(other.method) == "knorm + every:interval=14"
    for each, size in ((smaller, 10), (other, 14), (cache, 14)):
        assert kept(each) == [size]
        reader = Reader(model, each)
        decode(reader, 30)
        assert max(kept(each)) <= MOST
