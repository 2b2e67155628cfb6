# SPDX-License-Identifier: Apache-2.0
"""Triton's attention to entries quantized one by one, against the entries they decode to."""

import pytest
import torch

from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.triton import Splits, attend_to_per_token
from tests.helpers.gpu_inputs import (
    SCALE,
    assert_close,
    attended,
    noise,
)
from tests.helpers.gpu_inputs import segments as entries

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter", "poison")
GROUPS = pytest.mark.parametrize("groups", [1, 3, 8])
SIZES = pytest.mark.parametrize("size", [32, 40, 64, 128])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
LENGTHS = [0, 1, 63, 64, 0, 300]
SINKS = [0, 1, 2, 0, 0, 4]


def check(bits, groups, size, dtype, softcap=None, split=None, value_size=None):
    """Bits of keys and values; the first entries of some segments are whole, and left out."""
    keys = RotatedKeys.of(entries(LENGTHS, size, 100, dtype), bits[0], True, SINKS)
    values = TokenValues.of(entries(LENGTHS, value_size or size, 200, dtype), bits[1], SINKS)
    query = noise(len(LENGTHS), groups, size, seed=1, dtype=dtype)
    splits = split and Splits.of(keys.codes.lengths, split, query.device)
    out, lse = attend_to_per_token(query, keys, values, SCALE, softcap, splits=splits)
    decoded = [part.decoded.split(part.codes.lengths) for part in (keys, values)]
    expected = attended(query, *decoded, softcap)
    # The kernel reads keys before they are rounded to the dtype.
    assert_close(out, expected[0], dtype, 1e-5)
    assert_close(lse, expected[1], tolerance=3e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.slow
@pytest.mark.cases(8)
@GROUPS
@SIZES
@DTYPES
@pytest.mark.parametrize("bits", [(2, 3), (3, 4), (4, 2), (8, 4)], ids=str)
def test_quantized_entries_are_attended_to_as_they_are_decoded(groups, size, bits, dtype):
    check(bits, groups, size, dtype, 2.0 if groups == 3 else None)


@pytest.mark.slow
@pytest.mark.parametrize("split", [64, 128])
def test_long_segments_are_split(split):
    check((4, 4), 2, 32, torch.float32, split=split)


def test_values_of_another_head_size():
    check((4, 3), 2, 64, torch.float32, value_size=40)


def test_nothing_quantized_is_nothing_attended_to():
    keys = RotatedKeys.of(entries([0, 0], 32, 1, torch.float32), 4, True, [0, 0])
    values = TokenValues.of(entries([0, 0], 32, 2, torch.float32), 4, [0, 0])
    out, lse = attend_to_per_token(noise(2, 3, 32, seed=1), keys, values, SCALE)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
