# SPDX-License-Identifier: Apache-2.0
"""Triton's attention to packed entries, against the numbers that they stand for."""

import pytest
import torch

from kvfold.kernels.triton import (
    Splits,
    attend_to_packed,
)
from kvfold.kernels.triton.quantized import BothPacked
from tests.helpers.gpu_inputs import (
    SCALE,
    assert_close,
    attended,
    noise,
    packed,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter", "poison")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUPS = pytest.mark.parametrize("groups", [1, 4, 8])
SIZES = pytest.mark.parametrize("size", [32, 64, 128])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
BITS = pytest.mark.parametrize("bits", [2, 4, 8])
KEY_LENGTHS = [0, 32, 64, 96, 0, 320]
VALUE_LENGTHS = [0, 1, 63, 96, 40, 300]


def check_packed(keys, values, query, dtype, softcap=None, size=None, tolerance=4e-6):
    (packed_keys, key_numbers), (packed_values, value_numbers) = keys, values
    both = None
    if size is not None:
        lengths = list(map(min, packed_keys.lengths, packed_values.lengths))
        automatic = BothPacked.of(packed_keys.lengths, packed_values.lengths, DEVICE)
        starts = automatic.key_starts, automatic.value_starts, automatic.lengths
        both = BothPacked(*starts, Splits.of(lengths, size, DEVICE))
    out, lse = attend_to_packed(query, packed_keys, packed_values, SCALE, softcap, both=both)
    common = [
        (key[: len(value)], value[: len(key)])
        for key, value in zip(key_numbers, value_numbers, strict=True)
    ]
    expected = attended(query, *zip(*common, strict=True), softcap)
    assert_close(out, expected[0], dtype, tolerance)
    assert_close(lse, expected[1], tolerance=2e-2 if dtype == torch.bfloat16 else tolerance)


@pytest.mark.slow
@pytest.mark.cases(8)
@GROUPS
@SIZES
@BITS
@DTYPES
def test_packed_entries_are_attended_to_as_the_numbers_they_stand_for(groups, size, bits, dtype):
    keys = packed(KEY_LENGTHS, size, bits, 32, True, dtype, 100)
    values = packed(VALUE_LENGTHS, size, bits, 32, False, dtype, 200)
    query = noise(len(KEY_LENGTHS), groups, size, seed=1, dtype=dtype)
    check_packed(keys, values, query, dtype, 2.0 if groups == 4 else None)


@pytest.mark.parametrize(("key_bits", "value_bits"), [(2, 8), (8, 2), (4, 2)])
def test_packed_differently(key_bits, value_bits):
    """Other groups than 32, other bits for keys and values, head sizes of no power of two."""
    keys = packed([128, 256, 0], 40, key_bits, 128, True, torch.float32, 100)
    values = packed([100, 300, 7], 48, value_bits, 16, False, torch.float32, 200)
    query = noise(3, 3, 40, seed=1)
    check_packed(keys, values, query, torch.float32, size=64, tolerance=2e-5)


def test_what_is_packed_in_keys_alone_is_not_looked_at():
    keys = packed([96], 32, 4, 32, True, torch.float32, 100)
    keys[0].scale.rows[2] = keys[0].minimum.rows[2] = torch.nan
    values = packed([60], 32, 4, 32, False, torch.float32, 200)
    check_packed(keys, values, noise(1, 4, 32, seed=1), torch.float32)
