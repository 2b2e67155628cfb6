# SPDX-License-Identifier: Apache-2.0
"""The folder for `custom_generate=`: an explicit cache's answers, without a hub."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import kvfold
from kvfold import CompressedCache, KvfoldError
from tests.helpers.caches import GREEDY
from tests.helpers.models import build, prompts

FOLDER = str(Path(__file__).parents[2] / "examples" / "custom_generate")


@pytest.fixture
def model() -> Any:
    return build("llama", torch.float64)


def expected(model: Any, ids: Any, mask: Any, **options: Any) -> Any:
    cache = CompressedCache(model, "snapkv:window=8", 20)
    return kvfold.generate(model, ids, cache=cache, attention_mask=mask, **GREEDY | options)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(64,), (64, 40)])
def test_a_folder_generates_as_an_explicit_cache(model, lengths):
    ids, mask = prompts(lengths)
    options = {"custom_generate": FOLDER, "trust_remote_code": True, "method": "snapkv:window=8"}
    for how in ({}, {"prefill_chunk": 16}, {"num_beams": 2}):
        found = model.generate(ids, attention_mask=mask, budget=20, **options, **how, **GREEDY)
        assert torch.equal(found, expected(model, ids, mask, **how))


@pytest.mark.slow
def test_a_model_that_came_with_the_folder(model):
    """transformers puts such a function in the place of the model's `generate`."""
    ids, mask = prompts((64,))
    before = expected(model, ids, mask)
    loaded = model.load_custom_generate(FOLDER, trust_remote_code=True)
    model.generate = functools.partial(loaded, model=model)
    given = {"method": "snapkv:window=8", "budget": 20, "attention_mask": mask}
    assert torch.equal(model.generate(input_ids=ids, **given, **GREEDY), before)


def test_a_method_that_is_unknown_is_refused(model):
    ids, mask = prompts((64,))
    options = {"custom_generate": FOLDER, "trust_remote_code": True, "method": "nothing"}
    with pytest.raises(KvfoldError, match="unknown method 'nothing'"):
        model.generate(ids, attention_mask=mask, **options, **GREEDY)
