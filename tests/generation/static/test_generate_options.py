# SPDX-License-Identifier: Apache-2.0
"""Options of generate mean the same with compile=True: samples, ends, streams."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import GenerationConfig

import kvfold
from tests.helpers.budgets import compressed
from tests.helpers.compiled import (
    ALONE,
    COMPILED,
    GREEDY,
    PADDED,
    Streamer,
    both,
    check_same,
    small,
)
from tests.helpers.models import prompts

# Each graph takes seconds to compile.
pytestmark = pytest.mark.slow
RAGGED = "adakv:window=8"


@pytest.fixture
def model():
    torch._dynamo.reset()
    counters.clear()
    return small("llama")


@pytest.mark.cases(1)
@pytest.mark.parametrize("spec", ["snapkv:window=8", RAGGED])
def test_samples_are_the_same(model, spec):
    ids, mask = prompts(PADDED)
    outs = []
    for how in ({}, COMPILED):
        torch.manual_seed(3)
        options = {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2, **how}
        cache = compressed(model, spec)
        options |= {"attention_mask": mask, "max_new_tokens": 12}
        outs.append(kvfold.generate(model, ids, cache=cache, **options))
    assert outs[0].shape == (6, 76) and torch.equal(*outs)


def test_the_end_token_ends_and_room_for_more_is_given_back(model):
    (free, _), _ = both(model, "snapkv:window=8", PADDED)
    end = free[0, 64 + 5].item()
    outs, caches = both(
        model, "snapkv:window=8", ALONE, eos_token_id=end, pad_token_id=0, max_new_tokens=900
    )
    assert torch.equal(*outs) and outs[0].shape[1] < 64 + 900
    check_same(*caches)
    assert caches[1].stats().slack_bytes < 2 * caches[0].stats().slack_bytes
    outs, caches = both(
        model, "snapkv:window=8", PADDED, eos_token_id=end, pad_token_id=0, max_new_tokens=12
    )
    assert torch.equal(*outs)
    check_same(*caches)


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"max_new_tokens": None},
        {"max_length": 70, "do_sample": False},
        {"generation_config": GenerationConfig(max_new_tokens=7)},
        {"prefill_chunk": 10},
        {"repetition_penalty": 1.3, "min_new_tokens": 3},
    ],
    ids=str,
)
def test_options_of_generate_mean_the_same(model, options):
    outs, caches = both(model, "snapkv:window=8", **options)
    assert torch.equal(*outs)
    check_same(*caches)


def test_settings_of_the_model_count_where_the_call_has_none(model):
    model.generation_config.max_new_tokens = 30
    config = GenerationConfig(do_sample=False)
    outs, _ = both(model, "snapkv:window=8", generation_config=config)
    assert torch.equal(*outs) and outs[0].shape[1] == 64 + 30


def test_tokens_are_streamed(model):
    streamer = Streamer()
    ids = prompts(ALONE)[0]
    cache = compressed(model, "snapkv:window=8")
    out = kvfold.generate(model, ids, cache=cache, streamer=streamer, **GREEDY, **COMPILED)
    assert streamer.told == [*out[0].tolist(), -1]
