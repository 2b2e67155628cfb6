# SPDX-License-Identifier: Apache-2.0
"""Distances of two distributions, against golden numbers and loops in float64."""

from __future__ import annotations

import math

import pytest
import torch

from kvfold.checks.measure import distances, top

FULL, COMPRESSED = [2.0, 1.0, 0.0, -1.0], [1.5, 1.2, 0.0, -0.5]


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(math.exp(x) for x in logits))
    return [x - total for x in logits]


def by_hand(full: list[float], compressed: list[float]) -> float:
    pairs = zip(log_softmax(full), log_softmax(compressed), strict=True)
    return sum(math.exp(p) * (p - c) for p, c in pairs)


def test_golden_numbers() -> None:
    one, other, first = torch.tensor([FULL]), torch.tensor([COMPRESSED]), torch.tensor([0])
    assert distances(one, other, first).kl.item() == pytest.approx(0.059958, abs=1e-6)
    assert distances(other, one, first).kl.item() == pytest.approx(0.063229, abs=1e-6)


def test_every_position_equals_a_loop_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    full, compressed = (3 * torch.randn(20, 30, generator=generator) for _ in range(2))
    forced = torch.randint(30, (20,), generator=generator)
    found = distances(full, compressed, forced)
    for place in range(20):
        p, c = full[place].tolist(), compressed[place].tolist()
        token = int(forced[place])
        assert found.kl[place].item() == pytest.approx(by_hand(p, c), rel=1e-4)
        lost = log_softmax(p)[token] - log_softmax(c)[token]
        assert found.lost[place].item() == pytest.approx(lost, abs=1e-5)
        assert bool(found.agrees[place]) == (p.index(max(p)) == c.index(max(c)))


def test_the_lower_id_wins_ties() -> None:
    assert top(torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 0.0]])).tolist() == [1, 0]


def test_tokens_that_are_ruled_out_add_nothing() -> None:
    full = torch.tensor([[0.0, 0.0, -torch.inf]])
    found = distances(full, full, torch.tensor([0]))
    assert found.kl.tolist() == [0.0] and found.lost.tolist() == [0.0]
