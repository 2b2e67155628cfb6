# SPDX-License-Identifier: Apache-2.0
"""One reading is compressed to several budgets, each as a reading of its own."""

from __future__ import annotations

import pytest

import kvfold
from kvfold.errors import KvfoldError
from kvfold.eval.run.budgets import compressed
from tests.helpers.budgets import NAMED, needs_driver
from tests.helpers.evaluation import Setting, contents, equal, read, record, words
from tests.helpers.models import build

COMPOSED = ["snapkv:window=8 + kivi:group=8,residual=8", "h2o + merge:rule=d2o"]
SIZED = [spec for spec in [*NAMED, *COMPOSED] if kvfold.parse(spec).takes_budget]
BUDGETS = ["0.4", "16", "0.8"]


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


def test_methods_of_every_kind_are_compared():
    assert {"kvzip", "adakv", "h2o", "pyramidkv", "d2o", "random"} <= {
        spec.partition(":")[0] for spec in SIZED
    }
    assert any(needs_driver(spec) for spec in SIZED)


@pytest.mark.parametrize("spec", SIZED)
def test_a_budget_from_a_shared_reading_is_that_of_a_reading_of_its_own(setting, spec):
    sample, forwards = record(count=20), []
    kvfold.CompressedCache(setting.model, "full")  # a model's first cache is tried out
    hook = setting.model.model.register_forward_hook(lambda *_: forwards.append(1))
    try:
        shared = {
            each.budget: contents(each.context.cache)
            for each in compressed(setting.model, setting.prompt(sample), spec, BUDGETS, 7)
        }
        together, sizes = len(forwards), set()
        for budget in BUDGETS:
            forwards.clear()
            alone = kvfold.compress(
                setting.model, setting.tokenizer, sample.context, spec, budget, seed=7
            ).cache
            assert equal(shared[budget], contents(alone))
            sizes.add(alone.stats().kept_fraction)
    finally:
        hook.remove()
    assert len(shared) == len(sizes) == 3
    if kvfold.parse(spec).stages().token_pruning is None:
        assert together == len(forwards) > 0


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3"])
def test_sliding_layers_and_latents_get_every_budget_too(setting, family):
    """Latents are compressed inside the forward: each budget reads for itself."""
    model, sample, spec = build(family, vocab_size=2048), record(), "snapkv:window=8"
    found = list(compressed(model, setting.prompt(sample), spec, ["20", "12345B"], 0))
    assert len(found) == 2
    for each in found:
        alone = kvfold.compress(model, setting.tokenizer, sample.context, spec, each.budget)
        assert equal(contents(each.context.cache), contents(alone.cache))
        assert alone.stats().kept_fraction < 1
        # Samples bring what parts a question from the context.
        said = each.context.ask("\n\nSo?", max_new_tokens=5)
        assert said == alone.ask("So?", max_new_tokens=5)


def test_what_compresses_while_it_answers_cannot_be_asked_several_questions(setting):
    spec = "simlayerkv:window=8,when=first_decode"
    assert "first generated token" in setting.error(record(), spec)
    assert setting.outcome(record(), spec, question_aware=True).answers[0].tokens == 6


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


def test_one_budget_that_is_too_small_leaves_the_others(setting):
    for budgets in (["4", "20"], ["20", "4"]):
        cells = [setting.cell("kv_retrieval", "snapkv:window=8", budget) for budget in budgets]
        found = {sample.cell.budget: sample for sample in setting.run(record(), *cells)}
        assert "raise it to at least 8" in found["4"].error
        assert found["20"].outcome.held.kept == pytest.approx(20 / found["20"].outcome.held.seen)
