# SPDX-License-Identifier: Apache-2.0
"""Four bits a number: beside rounding written out, sizes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvfold import ContextFileError, KvfoldError
from kvfold.codecs.kivi import decode, encode

LENGTHS = [70, 31, 0, 32]


def heads(size: int = 16) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(length, size, generator=made) for length in LENGTHS]


@pytest.mark.parametrize("by_channel", [True, False])
def test_numbers_are_the_nearest_of_16_between_the_ends_of_their_group(by_channel):
    given = heads()
    found = decode(encode(given, by_channel), LENGTHS, by_channel)
    for was, now in zip(given, found, strict=True):
        expected, old = was.numpy().copy(), len(was) // 32 * 32
        for start in range(0, old, 32 if by_channel else 1):
            part = expected[start : start + (32 if by_channel else 1)]
            axis = 0 if by_channel else 1
            low, high = part.min(axis, keepdims=True), part.max(axis, keepdims=True)
            step = (high - low) / np.float32(15)
            part[:] = low + step * np.round((part - low) / step)
        torch.testing.assert_close(now, torch.from_numpy(expected), rtol=0, atol=1e-5)


def test_a_code_takes_four_bits():
    coded = encode(heads(), by_channel=True)
    assert coded["codes"].nbytes == (64 + 32) * 16 // 2
    assert coded["scale"].numel() == coded["minimum"].numel() == 3 * 16
    assert len(coded["whole"]) == 6 + 31


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_stays(dtype):
    given = [each.to(dtype) for each in heads()]
    assert all(each.dtype == dtype for each in decode(encode(given, True), LENGTHS, True))


@pytest.mark.parametrize("size", [12, 36, 40])
def test_heads_that_fill_no_words_or_groups_are_refused(size):
    with pytest.raises(KvfoldError, match=f'heads have {size}: save the context with codec="zstd"'):
        encode(heads(size), by_channel=False)


def test_heads_of_different_sizes_are_refused():
    with pytest.raises(KvfoldError, match="differ in their head sizes"):
        encode([*heads(16), *heads(32)], by_channel=True)


def test_numbers_that_are_not_finite_are_refused():
    given = heads()
    given[3][5, 5] = torch.nan
    with pytest.raises(KvfoldError, match="not finite"):
        encode(given, by_channel=True)


def test_codes_of_other_entries_are_refused():
    with pytest.raises(ContextFileError, match="do not fit the context's entries"):
        decode(encode(heads(), True), [70, 31, 0, 33], True)
