# SPDX-License-Identifier: Apache-2.0
"""A cache belongs to one model, and does not keep it alive."""

from __future__ import annotations

import gc
import weakref

import pytest

import kvfold
from kvfold import CompressedCache, UnsupportedModel
from tests.helpers.models import build, prompts
from tests.helpers.truth import Reader


@pytest.fixture
def model():
    return build("llama")


@pytest.mark.parametrize("names", [("llama", "llama"), ("llama", "gpt2")])
def test_a_cache_works_with_its_own_model_only(names):
    mine, other = (build(name, seed=i) for i, name in enumerate(names))
    kvfold.enable(other)
    cache = CompressedCache(mine, "knorm", 20)
    with pytest.raises(UnsupportedModel, match="another model"):
        Reader(other, cache)(prompts((64,))[0])


@pytest.mark.parametrize("read", [0, 64], ids=["fresh", "filled"])
def test_a_cache_with_another_model_that_was_never_enabled_is_refused(read):
    model, other = build("llama"), build("llama", seed=1)
    cache = CompressedCache(model, "knorm", 20)
    ids = prompts((65,))[0]
    if read:
        Reader(model, cache)(ids[:, :read])
    with pytest.raises(UnsupportedModel, match="kvfold's attention"):
        Reader(other, cache)(ids[:, read:])


def test_a_cache_does_not_keep_its_model_alive():
    model = build("llama")
    cache = CompressedCache(model, "streaming_llm", 20)
    Reader(model, cache)(prompts((64,))[0])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and len(cache.positions(0)[0][0]) == 20
