# SPDX-License-Identifier: Apache-2.0
"""Shares of spans: the largest remainder, and what is forced."""

from __future__ import annotations

import pytest
import torch

from kvfold.methods.stages.select.spans import best_of_spans, quotas


@pytest.mark.parametrize(
    "total, stored, least, expected",
    [
        (10, (7, 13, 4), (0, 0, 0), [3, 5, 2]),  # 2.92, 5.42, 1.67
        (5, (10, 10), (0, 0), [3, 2]),
        (10, (7, 13, 4), (0, 0, 4), [2, 4, 4]),  # six for two spans: 2.1, 3.9
        (10, (7, 13, 4), (5, 0, 4), [5, 1, 4]),
        (24, (7, 13, 4), (0, 0, 0), [7, 13, 4]),
        (3, (0, 9), (0, 0), [0, 3]),
    ],
)
def test_quotas(total, stored, least, expected):
    assert quotas(total, stored, least) == expected


def test_quotas_add_up_and_keep_what_is_forced():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        stored = torch.randint(0, 20, (4,), generator=generator).tolist()
        least = [int(torch.randint(0, n + 1, (1,), generator=generator)) for n in stored]
        total = int(torch.randint(sum(least), sum(stored) + 1, (1,), generator=generator))
        found = quotas(total, stored, least)
        assert sum(found) == total
        assert all(a <= n <= b for a, n, b in zip(least, found, stored, strict=True))


def test_each_span_keeps_its_best_and_padding_nothing():
    scores = torch.tensor([9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0]).expand(1, 1, -1)
    positions = torch.tensor([-1, -1, 0, 1, 2, 3, 4, 5, 6, 7]).expand(1, 1, -1)
    forced = torch.zeros_like(scores, dtype=torch.bool)
    forced[..., -1] = True
    slots = best_of_spans(None, scores, forced, positions, torch.tensor([[4]]), [(0, 4)])
    assert slots.tolist() == [[[2, 3, 6, 9]]]
