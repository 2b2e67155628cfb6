# SPDX-License-Identifier: Apache-2.0
"""Methods, budgets and options that a cache refuses when it is made."""

from __future__ import annotations

import dataclasses
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import kvfold
from kvfold import BudgetError, CompressedCache, IllegalComposition, KvfoldError, UnsupportedModel
from kvfold.cache.plan import checked_sizes
from kvfold.methods.stages.base import Stages
from tests.helpers.models import build, prompts
from tests.helpers.truth import Reader


@pytest.fixture
def model():
    return build("llama")


NUMBERS = sorted(
    (name, option.name)
    for name, cls in kvfold.list_methods().items()
    for option in dataclasses.fields(cls)
    if type(option.default) is int and name == cls.name
)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """2 GiB more than is used."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = re.search(r"VmSize:\s*(\d+) kB", Path("/proc/self/status").read_text())
    resource.setrlimit(resource.RLIMIT_AS, (int(used[1]) * 1024 + 2**31, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
@pytest.mark.cases(6)
@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_the_largest_number_of_an_option_takes_no_memory(model, little_memory, name, option):
    try:
        method = kvfold.parse(f"{name}:{option}={2**31 - 1}")
        cache = CompressedCache(model, method, 0.5 if method.takes_budget else None)
        kvfold.generate(model, prompts((60,))[0], cache=cache, max_new_tokens=1)
    except KvfoldError as refused:
        named = f"{name}|{option.rpartition('_')[2]}|budget|was fitted for"
        assert re.search(named, str(refused))


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_a_number_that_no_tensor_holds_is_refused_by_its_option(name, option):
    with pytest.raises(KvfoldError, match=f"{name}|{option.rpartition('_')[2]}"):
        kvfold.parse(f"{name}:{option}={10**20 + 1}")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("snapvk", "did you mean 'snapkv'"),
        ("", "empty method name"),
        ("snapkv:windows=3", "no option 'windows'"),
        ("snapkv:window", "option=value"),
        ("snapkv:window=", "option=value"),
        ("snapkv:window=many", "takes a whole number"),
        ("snapkv:pooling=min", "max or avg"),
        ("tova:per_head=perhaps", "takes true or false"),
    ],
)
def test_bad_methods_are_refused(model, spec, reason):
    with pytest.raises(KvfoldError, match=reason):
        CompressedCache(model, spec, 64)


def test_two_methods_that_both_choose_are_refused(model):
    with pytest.raises(IllegalComposition, match=r"snapkv.* and .*h2o.*both"):
        CompressedCache(model, "snapkv + h2o", 64)


@pytest.mark.parametrize("budget", [0, -5, 0.0, -0.1, 1.5, "0", "0%", "-3", "150%", "0MiB"])
@pytest.mark.parametrize("spec", ["knorm", "snapkv"])
def test_budgets_that_cannot_be_are_refused(model, spec, budget):
    with pytest.raises(BudgetError, match=r"positive|at most 1"):
        CompressedCache(model, spec, budget)


@pytest.mark.parametrize("budget", [True, {64}, "many", "3 apples", float("nan")])
def test_budgets_that_are_none_are_refused(model, budget):
    with pytest.raises(BudgetError):
        CompressedCache(model, "knorm", budget)


@pytest.mark.parametrize("budget", [64, 0.5, "1MiB"])
def test_a_superfluous_budget_is_refused(model, budget):
    with pytest.raises(BudgetError, match="no budget"):
        CompressedCache(model, "full", budget)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "protect", "least"),
    [
        ("snapkv", [], 32),
        ("snapkv_official", [], 64),
        ("pyramidkv", [], 8),
        ("streaming_llm", [], 4),
        ("streaming_llm:sinks=7", [], 7),
        ("knorm:protect_recent=9", [], 9),
        ("snapkv:window=8", [(0, 5), (3, 10)], 18),
        ("streaming_llm", [(2, 10)], 10),
        ("h2o", [(20, 32)], 12),
    ],
)
def test_a_budget_below_what_must_stay_is_refused_with_both_numbers(model, spec, protect, least):
    with pytest.raises(BudgetError, match=rf"\b{least}\b.*\b{least - 1}\b"):
        CompressedCache(model, spec, least - 1, protect=protect)
    cache = CompressedCache(model, spec, least, protect=protect)
    Reader(model, cache)(prompts((80,))[0])
    assert sum(len(cache.positions(layer)[0][0]) for layer in range(4)) == 4 * least


def test_whole_layers_that_do_not_fit_are_refused(model):
    cache = CompressedCache(model, "knorm:skip_layers=0/1", 0.2)
    with pytest.raises(BudgetError, match="skip fewer layers"):
        Reader(model, cache)(prompts((64,))[0])


@pytest.mark.parametrize("seed", [None, "x", 0.5])
def test_seeds_are_whole_numbers(model, seed):
    with pytest.raises(KvfoldError, match=rf"^seed is a whole number, not {seed!r}$"):
        CompressedCache(model, "random", 20, seed=seed)


def test_a_cache_is_made_for_the_model_itself(model):
    with pytest.raises(UnsupportedModel, match="give the model itself"):
        CompressedCache(torch.compile(model, backend="eager"), "snapkv", 40)
    with pytest.raises(UnsupportedModel, match="not 'my-model': load it first"):
        CompressedCache("my-model", "snapkv", 40)


@pytest.mark.parametrize(("sizes", "allowed"), [([0, 20], True), ([-1, 21], False), ([20], False)])
def test_a_layer_may_be_allocated_nothing_but_no_less(sizes, allowed):
    stages = Stages(score=lambda seen: seen.keys[..., 0], allocate=lambda *_: sizes)
    if allowed:
        assert checked_sizes(stages, 20, 10, 2) == sizes
    else:
        with pytest.raises(KvfoldError, match="whole numbers from 0 on"):
            checked_sizes(stages, 20, 10, 2)
