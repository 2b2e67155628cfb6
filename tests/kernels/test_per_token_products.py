# SPDX-License-Identifier: Apache-2.0
"""Products with quantized entries, against those with the entries decoded."""

import pytest
import torch

from kvfold.kernels.codebook import centroids, levels
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.per_token_products import products_with_keys, sum_of_values

SEGMENTS, GROUP, ENTRIES, SIZE = 3, 2, 40, 24


def rows(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tensors(encoded):
    return [part.rows.view(SEGMENTS, ENTRIES, -1) for part in (encoded.codes, encoded.scales)]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_the_centroids(bits):
    codes = torch.arange(2**bits).to(torch.uint8)
    table = centroids(bits, torch.float64, codes.device)
    torch.testing.assert_close(levels(codes, bits, torch.float64), table, atol=1e-12, rtol=0)
    single = levels(codes, bits, torch.float32).double()
    torch.testing.assert_close(single, table, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [1, 2, 5])
def test_products_are_those_with_decoded_keys(bits, group):
    keys, query = rows(0, SEGMENTS, ENTRIES, SIZE), rows(1, SEGMENTS, group, SIZE)
    encoded = RotatedKeys.of(list(keys), bits, True, [0] * SEGMENTS)
    expected = query @ torch.stack(encoded.segments).transpose(1, 2)
    got = products_with_keys(encoded.asked(query), *tensors(encoded), bits)
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(encoded.products(query), expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_sums_are_those_of_decoded_values(bits):
    values, weights = (
        rows(0, SEGMENTS, ENTRIES, SIZE),
        rows(1, SEGMENTS, GROUP, ENTRIES).softmax(-1),
    )
    encoded = TokenValues.of(list(values), bits, [0] * SEGMENTS)
    got = sum_of_values(weights, *tensors(encoded), bits)
    expected = weights @ torch.stack(encoded.segments)
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)


def test_products_of_half_precision_are_summed_up_in_full():
    keys = rows(0, SEGMENTS, ENTRIES, SIZE, dtype=torch.bfloat16)
    query = rows(1, SEGMENTS, GROUP, SIZE, dtype=torch.bfloat16)
    encoded = RotatedKeys.of(list(keys), 4, True, [0] * SEGMENTS)
    exact = RotatedKeys.of(list(keys.double()), 4, True, [0] * SEGMENTS)
    got = products_with_keys(encoded.asked(query), *tensors(encoded), 4)
    expected = query.double() @ torch.stack(exact.segments).transpose(1, 2)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-4)
