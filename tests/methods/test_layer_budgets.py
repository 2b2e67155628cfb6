# SPDX-License-Identifier: Apache-2.0
"""A budget for each layer: each layer as a cache of that budget has it, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import kvfold
from kvfold import CompressedCache, KvfoldError
from kvfold.methods.layer_budgets import layerwise
from tests.helpers.caches import ALONE, PADDED, kept, positions, start
from tests.helpers.commands import refused, run_json
from tests.helpers.contexts import DOCUMENT
from tests.helpers.models import build
from tests.helpers.tokenizers import word_tokenizer

SNAPKV = "snapkv:window=4"
LISTS: list[list[Any]] = [[0.25, 0.51, 0.3, 0.87], [20, 33, 8, 41], [1.0, 0.5, "30%", ".4"]]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.mark.cases(8)
@pytest.mark.slow
@pytest.mark.parametrize("method", [SNAPKV, "knorm:skip_layers=none", "h2o"])
@pytest.mark.parametrize("budgets", LISTS, ids=["ratios", "tokens", "texts"])
@pytest.mark.parametrize("lengths", [ALONE, PADDED, (9,)], ids=["alone", "padded", "short"])
def test_a_layer_keeps_what_it_keeps_in_a_cache_of_its_budget(
    model, method, budgets, lengths
) -> None:
    if lengths == (9,) and isinstance(budgets[0], float) and method != "knorm:skip_layers=none":
        pytest.skip("what must stay takes room from other layers")
    reader = start(model, method, lengths, budget=budgets)
    for layer, one in enumerate(budgets):
        alone = start(model, method, lengths, budget=one)
        assert positions(reader.cache)[layer] == positions(alone.cache)[layer], layer
        assert reader.cache.stats().kept[layer] == alone.cache.stats().kept[layer]


def test_equal_budgets_are_one(model) -> None:
    for one in (0.37, 23, "37%"):
        each, whole = (start(model, SNAPKV, PADDED, budget=b) for b in ([one] * 4, one))
        assert positions(each.cache) == positions(whole.cache)
        assert kept(each.cache) == kept(whole.cache)


def test_what_must_stay_in_a_layer_takes_room_from_the_others(model) -> None:
    cache = start(model, SNAPKV, ALONE, budget=[0.01, 0.5, 0.3, 0.4]).cache
    counts = [layer[0][0] for layer in cache.stats().kept]
    assert counts[0] == 4 and sum(counts) == sum([0, 32, 19, 25])


def test_rounds_hold_each_layer_s_budget(model) -> None:
    cache = start(model, SNAPKV, ALONE, budget=[20, 33, 8, 41], every=4).cache
    assert [layer[0][0] for layer in cache.stats().kept] == [20, 33, 8, 41]


def test_a_text_with_commas_is_a_list(model) -> None:
    as_text = CompressedCache(model, SNAPKV, "0.2, 0.5,30%,.4")
    assert as_text.method == CompressedCache(model, SNAPKV, [0.2, 0.5, 0.3, 0.4]).method
    assert str(as_text.method) == f"{SNAPKV} + sizes:parts=0.2/0.5/0.3/0.4"
    assert kvfold.parse(str(as_text.method)) == as_text.method
    assert as_text.budget == kvfold.Budget.ratio(0.35)
    assert CompressedCache(model, SNAPKV, [20, 33, 8, 42]).budget == kvfold.Budget.tokens(26)


def test_arrays_and_lists_in_brackets_are_lists(model) -> None:
    right = CompressedCache(model, SNAPKV, [0.2, 0.5, 0.3, 0.4])
    for given in (np.array([0.2, 0.5, 0.3, 0.4], np.float32), torch.tensor([0.2, 0.5, 0.3, 0.4])):
        assert CompressedCache(model, SNAPKV, given).method == right.method
    assert CompressedCache(model, SNAPKV, "[0.2, 0.5, 0.3, 0.4]").method == right.method
    counted = CompressedCache(model, SNAPKV, np.array([20, 33, 8, 42]))
    assert counted.budget == kvfold.Budget.tokens(26)


@pytest.mark.parametrize(
    ("method", "budgets", "message"),
    [
        (SNAPKV, [0.2, 0.3], "of 2 numbers has parts of 2 layers, and this model compresses 4"),
        (SNAPKV, [0.2] * 5, "of 5 numbers has parts of 5 layers"),
        (SNAPKV, [0.2, 30, 0.2, 0.2], "are all ratios, .* or all numbers of tokens, not"),
        (SNAPKV, ["1GiB"] * 4, "are all ratios"),
        (SNAPKV, [], "not none"),
        (SNAPKV, [0.2, 1.3, 0.2, 0.2], "at most 1.0"),
        (SNAPKV, [0.2, None, 0.2, 0.2], "a budget is an int"),
        (SNAPKV, [[0.2, 0.3]] * 4, "a budget is an int"),
        *((SNAPKV, text, "with a point") for text in ("0,2", " 0,25 ", "0,2,0,3", "[0, 2]")),
        (SNAPKV, "0.2,some", "cannot read 'some' as a budget"),
        (SNAPKV, [20, 3, 20, 20], "always keeps 4 .* the budget of layer 1 is 3: raise it"),
        ("kivi", [0.2] * 4, "takes no budget"),
        ("pyramidkv", [0.2] * 4, "sizes its layers by itself, so give it one budget"),
        ("kvzip", [0.2] * 4, "sizes its layers by itself"),
    ],
)
def test_what_is_no_budget_of_layers_is_refused(model, method, budgets, message) -> None:
    with pytest.raises(KvfoldError, match=message):
        CompressedCache(model, method, budgets, tokenizer=word_tokenizer())


def test_a_file_and_a_command_hold_it(tmp_path) -> None:
    bundled, tokenizer = kvfold.bundled_model()
    budgets = [0.2, 0.5, 0.3, 0.9]
    made = kvfold.compress(bundled, tokenizer, DOCUMENT, "knorm:skip_layers=none", budgets)
    seen = made.cache.get_seq_length()
    assert [layer[0][0] for layer in made.stats().kept] == [math.floor(b * seen) for b in budgets]
    made.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", bundled, tokenizer)
    assert loaded.stats().kept == made.stats().kept
    assert loaded.ask("What?", max_new_tokens=4) == made.ask("What?", max_new_tokens=4)
    (tmp_path / "text").write_text(DOCUMENT)
    given = ["compress", "bundled", str(tmp_path / "text"), "--method", "knorm:skip_layers=none"]
    given += ["--out", str(tmp_path / "a.kvfold"), "--budget"]
    found = run_json(*given, "0.2,0.5,0.3,0.9")
    assert found["stats"]["kept"] == made.stats().kept
    assert "parts of 2 layers" in refused(*given, "0.2,0.5", "--force")


def test_one_budget_stays_as_it_is() -> None:
    method = kvfold.parse("pyramidkv")
    for one in (0.2, 30, "2GiB", None, kvfold.Budget.ratio(0.5)):
        assert layerwise(method, one) == (method, one)
