# SPDX-License-Identifier: Apache-2.0
"""With budget to spare nothing changes; after eviction the logits are the masked-dense truth."""

from __future__ import annotations

import pytest
import torch

from kvfold import generate
from tests.helpers.budgets import (
    APPENDING,
    HOLDING,
    SMALL,
    SPARING,
    compressed,
    merges,
    moves,
)
from tests.helpers.exactness import (
    ALONE,
    FLOAT32_ONLY,
    PADDED,
    against_truth,
    assert_as_stock,
    kernel_spread,
    read_prompt,
)
from tests.helpers.models import FAMILIES, build, prompts
from tests.helpers.truth import Reader, sinks_moved_up

BATCHES = pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])


@BATCHES
@pytest.mark.parametrize("budget", [1.0, 1000])
@pytest.mark.parametrize("spec", SPARING)
def test_with_budget_to_spare_every_method_is_the_stock_cache(spec, budget, lengths):
    assert_as_stock("llama", spec, budget, lengths, torch.float32)


@BATCHES
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3", "deepseek_v3"])
def test_with_budget_to_spare_column_sums_change_no_logits(name, lengths):
    assert_as_stock(name, "h2o", 1.0, lengths, torch.float64)


@BATCHES
@pytest.mark.parametrize(("spec", "budget"), [("snapkv:window=8", 1.0), ("tova", 1000)])
@pytest.mark.parametrize("name", FAMILIES)
def test_with_budget_to_spare_every_family_is_the_stock_cache(name, spec, budget, lengths):
    assert_as_stock(name, spec, budget, lengths, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_with_budget_to_spare_every_dtype_is_the_stock_cache(dtype):
    assert_as_stock("llama", "pyramidkv", 1.0, PADDED, dtype)


@BATCHES
@pytest.mark.parametrize("spec", SPARING)
def test_with_budget_to_spare_greedy_tokens_are_stock(spec, lengths):
    ids, mask = prompts(lengths)
    model = build("llama")
    options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(
        generate(model, ids, cache=compressed(model, spec, 1.0), **options), expected
    )


@BATCHES
@pytest.mark.parametrize("spec", ["snapkv:window=8", "pyramidkv:window=8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_after_eviction_every_family_is_masked_dense(name, spec, lengths):
    dtype = torch.float32 if name in FLOAT32_ONLY else torch.float64
    off, effect, noise = against_truth(name, spec, lengths, dtype, every_step=False)
    assert off <= (max(2e-5, 3 * noise) if name in FLOAT32_ONLY else 1e-6)
    assert effect > 0.05


@BATCHES
@pytest.mark.parametrize("spec", APPENDING)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_after_eviction_appending_methods_are_masked_dense(name, spec, lengths):
    off, effect, _ = against_truth(name, spec, lengths, torch.float64, every_step=False)
    assert off <= 1e-6
    assert effect > 1.0


@BATCHES
@pytest.mark.parametrize("spec", [spec for spec in HOLDING if not moves(spec) and not merges(spec)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_evicting_at_every_step_is_masked_dense(name, spec, lengths):
    off, effect, _ = against_truth(name, spec, lengths, torch.float64, every_step=True)
    assert off <= 1e-6
    assert effect > 1.0


@BATCHES
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "gemma3n", "deepseek_v3", "qwen3_5"])
def test_evicting_at_every_step_is_masked_dense_in_unusual_families(name, lengths):
    off, effect, _ = against_truth(name, "tova", lengths, torch.float64, every_step=True)
    assert off <= 1e-6
    assert effect > 0.3


@pytest.mark.parametrize("spec", ["snapkv:window=8", "local_window", "h2o"])
def test_after_eviction_float32_is_masked_dense(spec):
    ids, _ = read_prompt(ALONE)
    spread = kernel_spread("llama", ids, None)
    off, _, _ = against_truth("llama", spec, ALONE, torch.float32, every_step=True)
    assert off <= max(2e-5, 3 * spread)


def test_pyramid_layers_differ_in_length():
    ids, _ = read_prompt(ALONE)
    model = build("llama")
    cache = compressed(model, "pyramidkv:window=8")
    Reader(model, cache)(ids)
    lengths = [len(cache.positions(layer)[0][0]) for layer in range(4)]
    assert len(set(lengths)) == 4 and sum(lengths) == 4 * SMALL


# --- sinks that move -------------------------------------------------------------------------


@BATCHES
def test_streaming_llm_is_dense_with_its_sinks_rotated(lengths):
    # The model's rotation is in float32.
    off, effect, _ = against_truth(
        "llama", "streaming_llm", lengths, torch.float64, every_step=True, move=sinks_moved_up
    )
    assert off <= 2e-5
    assert effect > 1.0


def test_rotating_the_sinks_matters():
    off, _, _ = against_truth("llama", "streaming_llm", ALONE, torch.float64, every_step=True)
    assert off > 0.1
