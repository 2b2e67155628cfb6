# SPDX-License-Identifier: Apache-2.0
"""With budget to spare nothing changes; after eviction the logits are the masked-dense truth."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.caches import ALONE, BATCHES, PADDED
from tests.helpers.exactness import (
    FLOAT32_ONLY,
    against_truth,
    assert_as_stock,
    kernel_spread,
    read_prompt,
)
from tests.helpers.models import FAMILIES, NEVER_SLIDING


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3", "deepseek_v3"])
def test_with_budget_to_spare_column_sums_change_no_logits(name, lengths):
    assert_as_stock(name, "h2o", 1.0, lengths, torch.float64)


@pytest.mark.slow
@pytest.mark.cases(6)
@BATCHES
@pytest.mark.parametrize(("spec", "budget"), [("snapkv:window=8", 1.0), ("tova", 1000)])
@pytest.mark.parametrize("name", FAMILIES)
def test_with_budget_to_spare_every_family_is_the_stock_cache(name, spec, budget, lengths):
    assert_as_stock(name, spec, budget, lengths, torch.float32)


@BATCHES
@pytest.mark.parametrize("name", NEVER_SLIDING)
def test_layers_whose_windows_never_slide_are_compressed_as_full_ones(name, lengths):
    assert_as_stock(name, "snapkv:window=8", 1.0, lengths, torch.float32)
    off, effect, _ = against_truth(name, "snapkv:window=8", lengths, torch.float64, False)
    assert off <= 1e-6
    assert effect > 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_with_budget_to_spare_every_dtype_is_the_stock_cache(dtype):
    assert_as_stock("llama", "pyramidkv", 1.0, PADDED, dtype)


@pytest.mark.slow
@pytest.mark.cases(3)
@BATCHES
@pytest.mark.parametrize("spec", ["snapkv:window=8", "pyramidkv:window=8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_after_eviction_every_family_is_masked_dense(name, spec, lengths):
    dtype = torch.float32 if name in FLOAT32_ONLY else torch.float64
    off, effect, noise = against_truth(name, spec, lengths, dtype, every_step=False)
    assert off <= (max(2e-5, 3 * noise) if name in FLOAT32_ONLY else 1e-6)
    assert effect > 0.05


@pytest.mark.slow
@pytest.mark.cases(2)
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
