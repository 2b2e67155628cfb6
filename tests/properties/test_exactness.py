# SPDX-License-Identifier: Apache-2.0
"""With budget to spare nothing changes; after eviction the logits are the masked-dense truth."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold import generate
from tests.helpers.budgets import (
    APPENDING,
    HOLDING,
    SMALL,
    SPARING,
    compressed,
    merges,
    moves,
    sums_columns,
)
from tests.helpers.models import FAMILIES, build, continuation, prompts
from tests.helpers.truth import MaskedDense, Reader, sinks_moved_up, stock_cache, worst

ALONE, PADDED = (64,), (64, 53, 24)
BATCHES = pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
# Their own attention rounds to float32 even in a float64 model, and is NaN there with padding.
FLOAT32_ONLY = ("gemma2",)


def read_prompt(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    ids, mask = prompts(lengths)
    return ids, None if lengths == ALONE else mask


def pieces(rows: int, steps: int, block: int = 12) -> list[Tensor]:
    """Single tokens, then one block."""
    ids = continuation(rows, steps + block)
    return [*ids[:, :steps].split(1, 1), ids[:, steps:]]


# --- budget at least the tokens seen ---------------------------------------------------------


def all_logits(reader: Reader, ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Of the prompt's tokens, of 6 single steps and of a block of 12."""
    first = reader(ids)
    return [first if mask is None else first[mask.bool()], *map(reader, pieces(len(ids), 6))]


def kernel_spread(name: str, ids: Tensor, mask: Tensor | None) -> float:
    """What two stock attention kernels differ by, in float32."""
    sdpa, eager = FAMILIES[name](), FAMILIES[name]()
    eager.set_attn_implementation("eager")
    readers = [Reader(model, stock_cache(model), mask) for model in (sdpa, eager)]
    return max(map(worst, *(all_logits(reader, ids, mask) for reader in readers)))


def assert_as_stock(
    name: str, spec: str, budget: float, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    ids, mask = read_prompt(lengths)
    model = FAMILIES[name](dtype)
    expected = all_logits(Reader(model, stock_cache(model), mask), ids, mask)
    cache = compressed(model, spec, budget)
    got = all_logits(Reader(model, cache, mask), ids, mask)
    if not sums_columns(spec):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    elif dtype == torch.float64:
        assert max(map(worst, got, expected)) <= 2e-6
    else:
        assert max(map(worst, got, expected)) <= max(2e-6, 3 * kernel_spread(name, ids, mask))
    seen = 64 + 6 + 12
    for layer in range(len(cache.states)):
        for row, length in zip(cache.positions(layer), lengths, strict=True):
            assert all(head.tolist() == list(range(64 - length, seen)) for head in row)


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


# --- after eviction --------------------------------------------------------------------------


def against_truth(
    name: str, spec: str, lengths: tuple[int, ...], dtype: torch.dtype, every_step: bool, **options
) -> tuple[float, float, float]:
    """Largest difference to the truth; smallest effect of eviction; noise of plain attention."""
    ids, mask = read_prompt(lengths)
    model = FAMILIES[name](dtype)
    plain = Reader(model, stock_cache(model), mask)
    truth = MaskedDense(FAMILIES[name](dtype), mask, **options)
    noise = worst(plain(ids), truth(ids), mask)
    steps = pieces(len(ids), 8)
    unmasked = [plain(piece) for piece in steps]
    cache = compressed(model, spec, SMALL)
    reader = Reader(model, cache, mask)
    reader(ids)
    truth.hide(cache)
    off, effect = [], []
    for piece, full in zip(steps, unmasked, strict=True):
        got, expected = reader(piece), truth(piece)
        off.append(worst(got, expected))
        effect.append(worst(full, expected))
        if every_step:
            truth.hide(cache)
    return max(off), min(effect), noise


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
