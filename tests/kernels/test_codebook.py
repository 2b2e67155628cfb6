# SPDX-License-Identifier: Apache-2.0
"""Lloyd–Max tables, rotations and packed codes, against their definitions."""

import math

import pytest
import torch

from kvfold.kernels.codebook import (
    boundaries,
    centroids,
    nearest,
    packed,
    rotated,
    rotated_back,
    rotation,
    unpacked,
)

CPU = torch.device("cpu")
BITS = pytest.mark.parametrize("bits", [2, 3, 4])
ERROR = {2: 0.117482, 3: 0.034548, 4: 0.009501}  # mean squared, of a unit Gaussian


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def below(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


@BITS
def test_each_centroid_is_the_mean_of_the_gaussian_between_its_boundaries(bits):
    table = centroids(bits, torch.float64, CPU)
    edges = [-40.0, *boundaries(bits, torch.float64, CPU).tolist(), 40.0]
    assert len(table) == 2**bits and edges == sorted(edges)
    for low, high, centroid in zip(edges, edges[1:], table.tolist(), strict=False):
        mean = (density(low) - density(high)) / (below(high) - below(low))
        assert centroid == pytest.approx(mean, abs=1e-11)


@BITS
def test_gaussian_numbers_lose_what_the_table_says(bits):
    numbers = torch.randn(400_000, generator=torch.Generator().manual_seed(0)).double()
    table = centroids(bits, torch.float64, CPU)
    error = (table[nearest(numbers, bits).int()] - numbers).square().mean().item()
    assert error == pytest.approx(ERROR[bits], rel=0.01)


@BITS
def test_codes_are_of_the_nearest_centroid_and_ties_go_up(bits):
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(1)).double()
    table, edges = (of(bits, torch.float64, CPU) for of in (centroids, boundaries))
    expected = (numbers[:, None] - table).abs().argmin(1)
    assert torch.equal(nearest(numbers, bits).long(), expected)
    assert nearest(edges, bits).tolist() == list(range(1, 2**bits))


@pytest.mark.parametrize("size", [1, 2, 8, 24, 40, 64, 80, 96, 112, 128, 576])
def test_a_rotation_keeps_lengths_and_products(size):
    matrix = rotation(size, torch.float64, CPU)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size).double(), atol=1e-12, rtol=0)
    rows = torch.randn(3, size, generator=torch.Generator().manual_seed(2)).double()
    turned = rotated(rows)
    torch.testing.assert_close(turned, torch.einsum("ij,nj->ni", matrix, rows))
    torch.testing.assert_close(turned @ turned.T, rows @ rows.T)
    torch.testing.assert_close(rotated_back(turned), rows)


@pytest.mark.parametrize("size", [64, 80])
def test_a_row_is_rotated_as_it_would_be_alone(size):
    rows = torch.randn(50, size, generator=torch.Generator().manual_seed(2))
    for turn in (rotated, rotated_back):
        assert torch.equal(turn(rows), torch.cat([turn(row[None]) for row in rows]))


@pytest.mark.parametrize("size", [2, 8, 64, 128])
def test_a_power_of_two_is_rotated_by_sylvesters_hadamard_matrix(size):
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    expected = torch.tensor(signs).double() / math.sqrt(size)
    torch.testing.assert_close(rotation(size, torch.float64, CPU), expected, atol=1e-14, rtol=0)


@BITS
@pytest.mark.parametrize("size", [8, 24, 64])
def test_codes_fill_their_bytes_and_come_back(bits, size):
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 2**bits, (7, size), generator=generator).to(torch.uint8)
    words = packed(codes, bits)
    assert words.dtype == torch.uint8 and words.shape == (7, size * bits // 8)
    assert torch.equal(unpacked(words, bits), codes)
    assert packed(codes[:0], bits).shape == (0, size * bits // 8)


def test_planes_hold_the_low_bits_first():
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]], dtype=torch.uint8)
    # Low two bits 1 2 3 0 1 2 3 0, four to a byte, two apart; third bits 0 0 0 1 1 1 1 0.
    expected = [1 | 3 << 2 | 1 << 4 | 3 << 6, 2 | 0 << 2 | 2 << 4 | 0 << 6, 0b01111000]
    assert packed(codes, 3).tolist() == [expected]
