# SPDX-License-Identifier: Apache-2.0
"""Mean rotation of consecutive positions, against a sum over all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.kernels.mean_rotation import mean_rotation

FREQUENCIES = torch.tensor([1.0, 0.3, 0.01])


def rotate(vectors: Tensor, shift: Tensor) -> Tensor:
    """Rotary pairs (0, 3), (1, 4), (2, 5), by `[B]` or `[B, n]` positions; component 6 stays."""
    angles = shift.view(len(shift), 1, -1, 1) * FREQUENCIES.to(vectors.dtype)
    a, b, still = vectors.split([3, 3, 1], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos, still], -1)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, 512])
def test_the_mean_of_all_positions(count):
    first = torch.tensor([0, 5, 1000])
    vectors = torch.randn(3, 2, 4, 7, generator=torch.Generator().manual_seed(count))
    turned = vectors @ mean_rotation(rotate, first, count, 7)[:, None]
    every = [rotate(vectors.double(), first + i) for i in range(count)]
    expected = torch.stack(every).mean(0)
    torch.testing.assert_close(turned.double(), expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(turned[:2].double(), expected[:2], atol=2e-6, rtol=0)


def test_without_rotary_embeddings_nothing_turns():
    turn = mean_rotation(lambda vectors, shift: vectors, torch.tensor([3]), 5, 4)
    assert torch.equal(turn[0], torch.eye(4))
