# SPDX-License-Identifier: Apache-2.0
"""A reading is compressed by other methods as if each had read the text itself."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.cache.copy_to_budget import copied_for, observing_alike, of_forwards, reading_together
from kvfold.errors import BudgetError, KvfoldError
from kvfold.generation.readers.reconstruct import reconstruct
from kvfold.generation.reading import read_on
from kvfold.methods.base import LastQueries, Needs
from kvfold.methods.observing import Observing
from kvfold.observers.column_sums import ColumnSquares, ColumnSums
from kvfold.observers.references import ReferenceQueries, ReferencesNeed
from tests.helpers.budgets import NAMED, needs_driver
from tests.helpers.evaluation import Setting, contents, equal, read, words

# Readers of every kind of observation, with windows as wide as any method's.
READERS = {
    (False, False): "snapkv:window=64",
    (True, False): "h2o",
    (True, True): "roco",
}


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


def kept(cache: kvfold.CompressedCache) -> list[list[list[list[int]]]]:
    """Positions of the entries `[layer][row][head]`."""
    return [state.positions().tolist() for state in cache.states]


def budget_of(spec: str) -> float | None:
    return 0.4 if kvfold.parse(spec).takes_budget else None


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("spec", [spec for spec in NAMED if not needs_driver(spec)])
def test_a_method_compresses_what_another_has_read(setting, spec):
    needs = kvfold.parse(spec).stages().needs
    # What no other method observes is read by the method itself, at another budget.
    shared = (ColumnSums, ColumnSquares, ReferencesNeed)
    own = any(not isinstance(need, shared) for need in needs.while_reading)
    reader = spec if own else READERS[ColumnSums in needs, ColumnSquares in needs]
    ids = setting.ids(words(60))
    shared = kvfold.CompressedCache(setting.model, reader, 0.5, seed=7)
    alone = kvfold.CompressedCache(setting.model, spec, budget_of(spec), seed=7)
    with shared.reading():
        read(setting.model, shared, ids)
        taken = shared.to_budget(budget_of(spec), spec)
    with alone.reading():
        read(setting.model, alone, ids)
    assert equal(contents(taken), contents(alone))
    assert str(taken.method) == str(alone.method)
    more = setting.ids(words(1))[:, -1:]
    for _ in range(3):
        outs = [setting.model(more, past_key_values=cache).logits for cache in (taken, alone)]
        assert outs[0].equal(outs[1])
    assert taken.stats().nbytes == alone.stats().nbytes


def test_a_reading_that_notes_reference_queries_serves_methods_without_a_refit(
    setting, monkeypatch
):
    def refuse(self, memo):
        raise AssertionError("queries that the method does not need were copied")

    monkeypatch.setattr(ReferenceQueries, "__deepcopy__", refuse, raising=False)
    ids = setting.ids(words(60))
    shared = kvfold.CompressedCache(setting.model, "snapkv:window=8 + match", 0.5)
    alone = kvfold.CompressedCache(setting.model, "snapkv:window=8", 0.4)
    with shared.reading():
        read(setting.model, shared, ids)
        taken = shared.to_budget(0.4, "snapkv:window=8")
    with alone.reading():
        read(setting.model, alone, ids)
    assert equal(contents(taken), contents(alone))
    assert taken.stats().nbytes == alone.stats().nbytes


@pytest.mark.parametrize(
    ("reader", "other"),
    [
        ("snapkv", "h2o"),
        ("h2o", "roco"),
        ("snapkv", "snapkv:window=65"),
        ("snapkv", "snapkv + match"),
    ],
)
def test_a_method_that_needs_more_is_refused(setting, reader, other):
    cache = kvfold.CompressedCache(setting.model, reader, 0.5)
    with cache.reading():
        read(setting.model, cache, setting.ids(words(20)))
        with pytest.raises(KvfoldError, match="observes other data"):
            cache.to_budget(0.5, other)


def test_a_budget_is_checked_for_the_other_method(setting):
    cache = kvfold.CompressedCache(setting.model, "snapkv:window=8", 0.5)
    with cache.reading():
        read(setting.model, cache, setting.ids(words(20)))
        with pytest.raises(BudgetError, match="takes no budget"):
            cache.to_budget(0.5, "full")
        with pytest.raises(BudgetError, match="needs a budget"):
            cache.to_budget(None, "knorm")
        assert cache.to_budget(None, "full").stats().kept_fraction == 1


def test_another_budget_is_only_taken_while_the_first_turn_is_read(setting):
    ids = setting.ids(words(20))
    cache = kvfold.CompressedCache(setting.model, "snapkv:window=8", 0.5)
    with pytest.raises(KvfoldError, match="first turn"):
        cache.to_budget(0.2)
    with cache.reading():
        read(setting.model, cache, ids)
        small = cache.to_budget(16)
        assert small.stats().kept[0][0] == [16, 16]
        assert cache.stats().kept[0][0] == [ids.shape[1]] * 2
    assert cache.stats().kept[0][0] == [ids.shape[1] // 2] * 2
    assert str(cache.budget) != str(small.budget)
    with cache.reading(), pytest.raises(KvfoldError, match="first turn"):
        cache.to_budget(0.2)


def test_methods_that_observe_the_same_are_served_by_the_one_that_notes_most():
    repeating = ["kvzip", "kvzip + match", "kvzip + kivi", "kvzip_plus", "kvzip:score=rms"]
    text = ["knorm", "snapkv", "snapkv + match", "kvzip + match:references=text", "h2o"]
    assert observing_alike([*repeating, *text], kvfold.parse) == [
        ["kvzip + match", "kvzip", "kvzip + kivi"],
        ["kvzip_plus"],
        ["kvzip:score=rms"],
        ["snapkv + match", "snapkv", "knorm"],
        ["kvzip + match:references=text"],
        ["h2o"],
    ]


def test_one_reading_observes_what_all_methods_need():
    """Repetitions of a text come after its reading; logits of all its tokens are read apart."""
    methods = ["knorm", "snapkv:window=8", "h2o", "snapkv:window=16", "roco", "kvzip", "sirllm"]
    (needs, together), (logits, alone) = reading_together(methods, kvfold.parse)
    assert together == methods[:-1] and alone == ["sirllm"]
    assert needs == Needs(LastQueries(16), ColumnSums(), ColumnSquares())
    assert logits == of_forwards(kvfold.parse("sirllm").stages().needs)


def test_needs_that_one_observation_cannot_serve_are_read_apart():
    methods = ["expected_attention", "expected_attention:sinks=9", "h2o"]
    groups = [group for _, group in reading_together(methods, kvfold.parse)]
    assert groups == [["expected_attention", "h2o"], ["expected_attention:sinks=9"]]


@pytest.mark.parametrize("spec", ["snapkv:window=8", "h2o", "roco", "knorm", "expected_attention"])
def test_a_reading_for_all_is_compressed_as_one_for_the_method_alone(setting, spec):
    """Kept sets are equal; where attention is summed up, products are added in another order."""
    methods = ["snapkv:window=8", "h2o", "roco", "knorm", "expected_attention"]
    ((needs, _),) = reading_together(methods, kvfold.parse)
    ids, alone = setting.ids(words(60)), kvfold.CompressedCache(setting.model, spec, 0.4)
    shared = kvfold.CompressedCache(setting.model, Observing(needs))
    with shared.reading():
        read(setting.model, shared, ids)
        taken = shared.to_budget(0.4, spec)
    with alone.reading():
        read(setting.model, alone, ids)
    assert kept(taken) == kept(alone)
    for ours, own in zip(taken.states, alone.states, strict=True):
        for one, other in zip(ours.stored().dense(), own.stored().dense(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_copy_goes_on_by_a_method_that_repeats_the_text(setting):
    ids = setting.ids(words(60))
    shared = kvfold.CompressedCache(setting.model, "h2o", 0.5, tokenizer=setting.tokenizer)
    alone = kvfold.CompressedCache(setting.model, "kvzip", 0.4, tokenizer=setting.tokenizer)
    with shared.reading():
        read_on(setting.model, shared, ids)
        with pytest.raises(KvfoldError, match="observes other data"):
            shared.to_budget(0.4, "kvzip")
        other = copied_for(shared, 0.4, kvfold.parse("kvzip"))
        reconstruct(setting.model, other, ids, None)
        taken = other.to_budget(0.4, "kvzip")
    with alone.reading():
        read_on(setting.model, alone, ids)
    assert kept(taken) == kept(alone)
    assert shared.stats().kept[0][0] == [90, 90]


def test_a_repeated_text_serves_no_method_that_repeats_nothing(setting):
    """Its opening is kept beside the budget."""
    cache = kvfold.CompressedCache(setting.model, "kvzip", 0.5, tokenizer=setting.tokenizer)
    with cache.reading():
        read_on(setting.model, cache, setting.ids(words(60)))
        with pytest.raises(KvfoldError, match="observes other data"):
            cache.to_budget(0.5, "knorm")
