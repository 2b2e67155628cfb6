# SPDX-License-Identifier: Apache-2.0
"""Recency and seeded noise as scores; padding goes first."""

import dataclasses

import torch

from kvfold.methods.stages.score.position import recency, uniform_noise
from kvfold.observers.column_sums import ColumnSums
from tests.helpers.observations import alone, observe


def test_recency_ranks_by_position():
    order = recency(observe([6, 4])).argsort(-1, descending=True)
    assert order[0].tolist() == [[5, 4, 3, 2, 1, 0]] * 2
    assert order[1, :, :4].tolist() == [[5, 4, 3, 2]] * 2


def test_noise_is_fixed_by_its_seed():
    first, again, other = (uniform_noise(observe([60], seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0, 0], first[0, 1])
    assert first.shape == (1, 2, 60)


def test_the_noise_of_a_padded_row_is_its_own():
    seen = observe([5, 9, 1], seed=3)
    noise = uniform_noise(seen)
    for row, length in enumerate([5, 9, 1]):
        by_itself = uniform_noise(alone(seen, row, length))
        assert torch.equal(noise[row, :, -length:], by_itself[0])


def test_padding_goes_first_and_takes_everything_along():
    seen = observe([6, 6], observed={ColumnSums: torch.rand(2, 2, 6)})
    gap = torch.tensor([0, 1, -1, -1, 2, 3]).expand(2, 2, 6)
    moved, order = dataclasses.replace(seen, positions=gap).padding_first()
    assert order[0, 0].tolist() == [2, 3, 0, 1, 4, 5]
    assert moved.positions[1, 1].tolist() == [-1, -1, 0, 1, 2, 3]
    for name in ("keys", "values", "column_sums"):
        assert torch.equal(getattr(moved, name), getattr(seen, name)[:, :, order[0, 0]])
    assert seen.padding_first() == (seen, None)


def test_noise_is_uniform():
    noise = uniform_noise(observe([5000]))
    assert noise.min() >= 0 and noise.max() < 1
    share = torch.histc(noise, bins=10, min=0, max=1) / noise.numel()
    assert (share - 0.1).abs().max() < 0.015
