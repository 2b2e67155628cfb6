# SPDX-License-Identifier: Apache-2.0
"""Triton's packing, bit for bit that of plain torch."""

import pytest
import torch

from kvfold.kernels import packing as store
from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.kernels.triton import (
    pack_keys,
    pack_values,
)
from kvfold.kernels.views import Flat
from tests.helpers.gpu_inputs import (
    noise,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter", "poison")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = pytest.mark.parametrize("size", [32, 64, 128])
BITS = pytest.mark.parametrize("bits", [2, 4, 8])


@pytest.mark.slow
@SIZES
@BITS
@pytest.mark.parametrize("group", [32, 128])
def test_packing_is_that_of_plain_torch_to_the_bit(size, bits, group, monkeypatch):
    monkeypatch.setattr(store, "pack_path", lambda *_: "torch")
    rows = 3 * noise(2 * group, size, seed=bits)
    rows[:group, 3] = 0.7  # constant, in a group of keys
    rows[5] = -2.5  # and in those of values
    rows[:, 7] = torch.arange(2 * group, device=DEVICE) % (2 ** (bits + 1) - 1) / 2  # ties
    # On a GPU torch divides by a number as if it multiplied: the codes are those of a CPU.
    expected = PackedKeys.of([rows.cpu()], bits, group)
    check_same(pack_keys(rows, bits, group), expected)
    if size % group == 0:
        expected = PackedValues.of([rows.cpu()], bits, group)
        check_same(pack_values(rows, bits, group), expected)


def check_same(got, expected):
    for tensor, other in zip(got, expected.tensors(), strict=True):
        assert tensor.dtype == other.dtype and torch.equal(tensor.cpu(), other)


@BITS
def test_packing_bfloat16_is_within_half_a_step(bits):
    rows = noise(64, 64, seed=bits, dtype=torch.bfloat16)
    for pack, kind in ((pack_keys, PackedKeys), (pack_values, PackedValues)):
        words, scale, minimum = pack(rows, bits, 32)
        lengths = [[len(x)] for x in (words, scale, minimum)]
        stored = map(Flat, (words, scale, minimum), lengths)
        error = (kind(*stored, bits, 32).segment(0).double() - rows.double()).abs()
        # A scale of 8 bits may fall short of the whole range by 2⁻⁸ of it.
        assert (error <= scale.max().double() * (0.5 + 2**bits / 2**8) + 0.02).all()


def test_what_the_store_packs_goes_through_the_kernel(monkeypatch):
    """Both kinds, and what is read back since an entry in the middle of a group."""
    segments = [noise(64, 32, seed=seed) for seed in range(3)]
    kinds = (PackedKeys, PackedValues)
    with monkeypatch.context() as patch:
        for reference in ("quantize", "pack"):
            patch.setattr(store, reference, None)
        of_kernel = [kind.of(segments, 4, 32) for kind in kinds]
    monkeypatch.setattr(store, "pack_path", lambda *_: "torch")
    expected = [kind.of([rows.cpu() for rows in segments], 4, 32) for kind in kinds]
    for mine, plain in zip(of_kernel, expected, strict=True):
        check_same(mine.tensors(), plain)
        for first in (0, 32, 41, 64):
            whole = torch.stack([mine.segment(i)[first:] for i in range(3)])
            assert torch.equal(mine.since(first), whole)


def test_packing_nothing():
    words, scale, minimum = pack_keys(noise(0, 32, seed=1), 4, 32)
    assert words.shape == (0, 32) and scale.shape == minimum.shape == (0, 32)
