# SPDX-License-Identifier: Apache-2.0
"""Attention inside chunks: golden numbers, and a loop over chunks in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.kernels import chunk_attention
from kvfold.kernels.chunk_attention import chunk_sums
from tests.helpers.observations import KEYS, QUERIES, T

GOLDEN = [1.102143, 0.790987, 1.193344, 0.913526, 0.908624, 1.197815, 0.980964, 0.912597]


def naive(queries: Tensor, keys: Tensor, size: int) -> Tensor:
    """Sums `[Hq, n]` of queries and keys `[Hq, n, D]`, chunk by chunk; the last may be short."""
    sums = []
    for q, k in zip(queries.double(), keys.double(), strict=True):
        parts = [
            (a @ b.T).softmax(-1).sum(0) for a, b in zip(q.split(size), k.split(size), strict=True)
        ]
        sums.append(torch.cat(parts))
    return torch.stack(sums)


def test_golden() -> None:
    sums = chunk_sums(QUERIES[None, None], KEYS[None, None], torch.arange(T)[None], 4)
    torch.testing.assert_close(sums[0, 0], torch.tensor(GOLDEN), atol=2e-6, rtol=0)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("tile", [1, 2**24])
def test_each_row_has_chunks_of_its_own(group: int, tile: int, monkeypatch) -> None:
    monkeypatch.setattr(chunk_attention, "TILE", tile)
    generator = torch.Generator().manual_seed(group)
    queries = torch.randn(2, 2 * group, 23, 8, generator=generator)
    keys = torch.randn(2, 2, 23, 8, generator=generator)
    columns = torch.full((2, 25), -1)
    columns[0, :23], columns[1, :11] = torch.arange(23), torch.arange(12, 23)
    sums = chunk_sums(queries, keys, columns, 5)
    for row, length in enumerate((23, 11)):
        own = slice(23 - length, 23)
        repeated = keys[row].repeat_interleave(group, 0)
        expected = naive(queries[row][:, own], repeated[:, own], 5)
        expected = expected.unflatten(0, (2, group)).mean(1)
        torch.testing.assert_close(sums[row, :, :length].double(), expected, atol=1e-5, rtol=1e-4)
        assert not sums[row, :, length:].any()
