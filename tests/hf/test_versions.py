# SPDX-License-Identifier: Apache-2.0
"""A cache is the same under both of its names, and transformers outside the range is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import kvfold
from kvfold import CompressedCache, KvfoldError, UnsupportedModel
from kvfold.hf import versions
from tests.helpers.models import build, prompts

GREEDY = {"do_sample": False, "max_new_tokens": 3}
by_name = pytest.mark.parametrize("name", ["cache", "past_key_values"])


@pytest.fixture
def model():
    return build("llama")


def cache_of(model, method="snapkv:window=8"):
    return CompressedCache(model, method, 20)


@by_name
@torch.no_grad()
def test_a_forward_reads_into_the_cache_under_either_name(model, name):
    ids, cache, other = prompts((64,))[0], cache_of(model), cache_of(model)
    expected = model(ids, use_cache=True, **{versions.CACHE: other}).logits
    assert torch.equal(model(ids, **{name: cache}).logits, expected)
    assert cache.get_seq_length() == 64
    assert str(cache.positions(1)) == str(other.positions(1))
    assert cache.phase.history.whole().tolist() == ids.tolist()


@torch.no_grad()
def test_a_forward_reads_into_a_cache_given_by_position(model):
    ids, mask = prompts((64,))
    cache = cache_of(model)
    model(ids, mask, None, cache)
    assert cache.get_seq_length() == 64 and cache.stats().kept_fraction < 0.5
    with pytest.raises(KvfoldError, match="use_cache=False"):
        model(ids, mask, None, cache, None, None, False)


@by_name
def test_guards_know_the_cache_under_either_name(model, name):
    cache = cache_of(model)
    with pytest.raises(KvfoldError, match="use_cache=False"):
        model(prompts((64,))[0], use_cache=False, **{name: cache})
    assert cache.get_seq_length() == 0


@by_name
@torch.no_grad()
def test_logits_that_the_caller_leaves_out_are_read_under_either_name(model, name):
    ids, cache, other = prompts((64,))[0], cache_of(model, "sirllm"), cache_of(model, "sirllm")
    assert model(ids, logits_to_keep=1, **{name: cache}).logits.shape[1] == 1
    model(ids, **{versions.CACHE: other})
    assert str(cache.positions(1)) == str(other.positions(1))


def test_two_caches_are_refused(model):
    caches = {name: cache_of(model) for name in versions.CACHE_NAMES}
    with pytest.raises(KvfoldError, match="one argument"):
        model(prompts((64,))[0], **caches)
    assert not any(cache.get_seq_length() for cache in caches.values())


@pytest.mark.slow
@by_name
def test_an_enabled_generate_takes_a_cache_under_either_name(model, name):
    ids, cache = prompts((64,))[0], CompressedCache(model, "full")
    expected = model.generate(ids, **GREEDY)
    with kvfold.enable(model, "snapkv:window=8", 20):
        assert torch.equal(model.generate(ids, **{name: cache}, **GREEDY), expected)
        assert not torch.equal(model.generate(ids, **{name: None}, **GREEDY), expected)
    assert cache.get_seq_length() == 66


@pytest.mark.parametrize("version", ["5.14.1", "5.25.0.dev0", "6.0.0"])
def test_versions_outside_the_range_are_refused_by_their_number(model, monkeypatch, version):
    monkeypatch.setattr(versions, "INSTALLED", Version(version))
    with pytest.raises(UnsupportedModel, match=rf"transformers {version}, .* 5\.15 to 5\.24"):
        cache_of(model)


def test_the_range_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (needs,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "transformers")
    ends = versions.OLDEST, versions.NEWEST
    inside = [f"{major}.{minor}.{patch}" for major, minor in ends for patch in (0, 9)]
    assert all(each in needs.specifier for each in inside)
    (before, after) = ((versions.OLDEST[1] - 1, 99), (versions.NEWEST[1] + 1, 0))
    assert not any(f"5.{minor}.{patch}" in needs.specifier for minor, patch in (before, after))
