# SPDX-License-Identifier: Apache-2.0
"""Products of bytes, against those of the numbers that the bytes stand for."""

import pytest
import torch

from kvfold.kernels.native.products import ByteMatrix, available

pytestmark = [
    pytest.mark.skipif(not available(), reason="no instructions for products of bytes"),
    pytest.mark.usefixtures("poison"),
]


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_codes(*shape, most=127):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-most, most + 1, shape, generator=generator).to(torch.int16)


def every(count):
    return torch.ones(count, dtype=torch.bool)


def rounded(matrix):
    """Rows in whole steps of a 127th of their largest number, float64."""
    steps = matrix.double().abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return (matrix.double() / steps).round() * steps


@pytest.mark.parametrize("size", [(1, 1), (47, 3), (48, 4), (49, 30), (200, 129)], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 8, 20])
def test_products_are_those_of_the_rounded_matrix(size, tokens):
    matrix, codes, offsets = noise(*size), random_codes(size[1], tokens), noise(size[0], seed=2)
    got = ByteMatrix.of(matrix).products(range(size[1]), codes, every(size[1]), offsets, 0.5)
    expected = offsets.double() + 0.5 * codes.double().T @ rounded(matrix).T
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


def test_columns_without_codes_add_nothing():
    matrix, codes, chosen = noise(60, 40), random_codes(3, 10), [2, 11, 39]
    got = ByteMatrix.of(matrix).products(chosen, codes, every(3), torch.zeros(60), 1.0)
    expected = codes.double().T @ rounded(matrix)[:, chosen].T
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
    nothing = ByteMatrix.of(matrix).products([], codes[:0], every(0), torch.ones(60), 1.0)
    assert torch.equal(nothing, torch.ones(10, 60))


def test_codes_that_are_not_chosen_count_as_none():
    matrix, codes, chosen = noise(60, 40), random_codes(40, 10), torch.arange(40) % 3 > 0
    codes[~chosen] *= 100
    got = ByteMatrix.of(matrix).products(range(40), codes, chosen, torch.zeros(60), 1.0)
    expected = codes[chosen].double().T @ rounded(matrix)[:, chosen].T
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


def test_the_largest_sums_are_exact():
    """As many as a basis has directions, all of one sign."""
    matrix, codes = torch.ones(48, 6144), torch.full((6144, 8), 127, dtype=torch.int16)
    got = ByteMatrix.of(matrix).products(range(6144), codes, every(6144), torch.zeros(48), 1.0)
    assert torch.equal(got, torch.full((8, 48), 127.0 * 6144))


def test_rows_of_zeros_stay_zero():
    matrix = noise(50, 8)
    matrix[3] = 0
    got = ByteMatrix.of(matrix).products(
        range(8), random_codes(8, 5), every(8), torch.zeros(50), 1.0
    )
    assert not got[:, 3].any() and got.isfinite().all()


def test_any_number_of_threads_gives_the_same_bits():
    made, codes, threads = (
        ByteMatrix.of(noise(300, 64)),
        random_codes(64, 50),
        torch.get_num_threads(),
    )
    outs = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            outs.append(made.products(range(64), codes, every(64), torch.zeros(300), 1.0))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*outs)
