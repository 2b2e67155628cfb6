# SPDX-License-Identifier: Apache-2.0
"""Operations of C++ are counted like those of torch."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.kernels.native import products
from kvfold.kernels.native.attention import attend_to_per_token
from kvfold.kernels.native.library import library, operations_so_far
from kvfold.kernels.native.products import ByteMatrix
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.measure.cost import measured
from tests.helpers.gpu_inputs import SCALE, noise, segments
from tests.helpers.models import build

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")


def test_attention_counts_both_of_its_products():
    query = noise(2, 3, 32, seed=1)
    keys, values = (segments([5, 9], size, size, torch.float32) for size in (32, 64))
    rotated = RotatedKeys.of(keys, 4, True, [0, 0])
    with measured(CPU) as turning:
        rotated.asked(query)
    with measured(CPU) as cost:
        attend_to_per_token(query, rotated, TokenValues.of(values, 4, [0, 0]), SCALE)
    assert cost.operations - turning.operations == 2 * 3 * (32 + 64) * 14


@pytest.mark.parametrize("method", ["kivi:group=8,residual=8", "turboquant"])
def test_a_step_over_quantized_entries_counts_those_over_raw_ones(method):
    model, ids = build("llama"), torch.arange(1, 101)[None]
    found = []
    for spec in ("full", method):
        cache = kvfold.CompressedCache(model, spec)
        with cache.reading():
            model(ids[:, :-1], past_key_values=cache)
        before = operations_so_far()
        with measured(CPU) as cost:
            model(ids[:, -1:], past_key_values=cache)
        found.append(cost.operations)
        assert (operations_so_far() > before) == (spec == method)
    # More only by the rotation of queries and outputs.
    assert found[0] <= found[1] < 1.1 * found[0]


@pytest.mark.skipif(not products.available(), reason="this CPU does not multiply bytes")
def test_products_of_bytes_count_those_of_their_columns():
    codes, every = torch.ones(8, 5, dtype=torch.int16), torch.ones(8, dtype=torch.bool)
    with measured(CPU) as cost:
        ByteMatrix.of(noise(48, 8, seed=1)).products(range(8), codes, every, torch.zeros(48), 1.0)
    assert cost.operations == 2 * 5 * 48 * 8
