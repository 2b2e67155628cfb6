# SPDX-License-Identifier: Apache-2.0
"""Logits of a compressed cache beside those of stock and masked-dense caches."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.helpers.budgets import (
    SMALL,
    compressed,
    sums_columns,
)
from tests.helpers.caches import ALONE
from tests.helpers.models import build, continuation, prompts
from tests.helpers.truth import MaskedDense, Reader, stock_cache, worst

# Their own attention rounds to float32 even in a float64 model, and is NaN there with padding.
FLOAT32_ONLY = ("gemma2",)


def read_prompt(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    ids, mask = prompts(lengths)
    return ids, None if lengths == ALONE else mask


def pieces(rows: int, steps: int, block: int = 12) -> list[Tensor]:
    """Single tokens, then one block."""
    ids = continuation(rows, steps + block)
    return [*ids[:, :steps].split(1, 1), ids[:, steps:]]


def all_logits(reader: Reader, ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Of the prompt's tokens, of 6 single steps and of a block of 12."""
    first = reader(ids)
    return [first if mask is None else first[mask.bool()], *map(reader, pieces(len(ids), 6))]


def kernel_spread(name: str, ids: Tensor, mask: Tensor | None) -> float:
    """What two stock attention kernels differ by, in float32."""
    sdpa, eager = build(name), build(name)
    eager.set_attn_implementation("eager")
    readers = [Reader(model, stock_cache(model), mask) for model in (sdpa, eager)]
    return max(map(worst, *(all_logits(reader, ids, mask) for reader in readers)))


def assert_as_stock(
    name: str, spec: str, budget: float, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    ids, mask = read_prompt(lengths)
    model = build(name, dtype)
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


def against_truth(
    name: str, spec: str, lengths: tuple[int, ...], dtype: torch.dtype, every_step: bool, **options
) -> tuple[float, float, float]:
    """Largest difference to the truth; smallest effect of eviction; noise of plain attention."""
    ids, mask = read_prompt(lengths)
    model = build(name, dtype)
    plain = Reader(model, stock_cache(model), mask)
    truth = MaskedDense(build(name, dtype), mask, **options)
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
