# SPDX-License-Identifier: Apache-2.0
"""Packing numbers in 2 to 8 bits: codes, steps and bytes, against loops."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvfold.kernels.packing import PackedKeys, PackedValues, dequantize, pack, quantize, unpack
from tests.helpers.encoded import GROUP, SIZE, assert_same, entries, nbytes

BITS = pytest.mark.parametrize("bits", [2, 4, 8])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
PACKINGS = pytest.mark.parametrize("packed", [PackedKeys, PackedValues])
RAGGED = [48, 0, 16, 32]


def naive_codes(numbers, bits):
    """Codes, scale and minimum of one group of floats."""
    low, high = min(numbers), max(numbers)
    scale = (high - low) / (2**bits - 1)
    codes = [0 if scale == 0 else round((x - low) / scale) for x in numbers]
    return codes, scale, low


def test_four_numbers_in_two_bits():
    x = torch.tensor([0, 1, 2, 3.3])
    codes, scale, minimum = quantize(x, 2, 0)
    assert codes.tolist() == [0, 1, 2, 3]
    assert scale.item() == pytest.approx(1.1)
    assert dequantize(codes, scale, minimum).tolist() == pytest.approx([0, 1.1, 2.2, 3.3])


def test_keys_are_quantized_per_channel_and_values_per_token():
    tokens = torch.tensor([[0.0, 10], [1, 10], [2, 10], [3, 14]])
    codes, scale, _ = quantize(tokens, 2, 0)
    assert codes.T.tolist() == [[0, 1, 2, 3], [0, 0, 0, 3]]
    assert scale[0].tolist() == pytest.approx([1, 4 / 3])
    codes, scale, _ = quantize(tokens, 2, 1)
    assert codes[0].tolist() == [0, 3]
    assert scale[[0, 3], 0].tolist() == pytest.approx([10 / 3, 11 / 3])


def test_halves_are_rounded_to_even():
    codes, _, _ = quantize(torch.tensor([0, 0.5, 1.5, 2.5, 3]), 2, 0)
    assert codes.tolist() == [0, 0, 2, 2, 3]


def test_the_first_code_is_in_the_low_bits():
    codes = torch.tensor([[0, 1, 2, 3] + [0] * 12], dtype=torch.uint8)
    assert pack(codes, 2, 1).tolist() == [[0b11100100]]
    assert pack(codes.T, 2, 0).tolist() == [[228]]


@pytest.mark.slow
@BITS
@pytest.mark.parametrize("dim", [0, 1])
@given(st.integers(0, 3), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_packing_is_undone(bits, dim, words, other, rng):
    shape = [other, other]
    shape[dim] = words * 32 // bits
    codes = [[rng.randrange(2**bits) for _ in range(shape[1])] for _ in range(shape[0])]
    codes = torch.tensor(codes, dtype=torch.uint8).view(shape)
    packed = pack(codes, bits, dim)
    assert packed.dtype == torch.int32
    assert packed.shape[dim] == words
    assert torch.equal(unpack(packed, bits, dim), codes)


@pytest.mark.slow
@BITS
@PACKINGS
def test_packed_entries_are_those_of_a_loop(packed, bits):
    segments = entries(RAGGED, torch.float64)
    encoded = packed.of(segments, bits, GROUP)
    for i, segment in enumerate(segments):
        # Groups run down the columns of keys, and along the rows of values.
        lines = segment.T if packed is PackedKeys else segment
        restored = torch.zeros_like(lines)
        words = torch.zeros(len(lines), lines.shape[1] * bits // 32, dtype=torch.int64)
        for line in range(len(lines)):
            for start in range(0, lines.shape[1], GROUP):
                group = lines[line, start : start + GROUP].tolist()
                codes, scale, low = naive_codes(group, bits)
                for j, code in enumerate(codes, start):
                    restored[line, j] = code * scale + low
                    words[line, j * bits // 32] |= code << j * bits % 32
        if packed is PackedKeys:
            restored, words = restored.T, words.T
        assert torch.equal(encoded.words.segment(i), words.to(torch.int32))
        torch.testing.assert_close(encoded.segment(i), restored)


@pytest.mark.slow
@BITS
@DTYPES
@given(seed=st.integers(0, 10**6), spread=st.floats(1e-2, 1e3), offset=st.floats(-1e3, 1e3))
@settings(max_examples=30, deadline=None)
def test_a_number_is_restored_within_half_a_step(bits, dtype, seed, spread, offset):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(4, GROUP, generator=generator) * spread + offset).to(dtype)
    codes, scale, minimum = quantize(x, bits, 1)
    restored = dequantize(codes, scale, minimum).double()
    # The scale's rounding counts once per step, that of the result once.
    rounding = torch.finfo(dtype).eps * (2**bits * scale.double() + 2 * x.double().abs())
    assert ((restored - x.double()).abs() <= scale.double() / 2 + rounding).all()
    assert torch.equal(restored.amin(1), x.double().amin(1))
    for other in (-1, 1):
        others = (codes.int() + other).clamp(0, 2**bits - 1)
        errors = [
            (c * scale.double() + minimum.double() - x.double()).abs() for c in (codes, others)
        ]
        assert (errors[0] <= errors[1] + 1e-6 * x.double().abs().amax()).all()
    if dtype == torch.float32:
        assert ((restored.amax(1) - x.double().amax(1)).abs() <= rounding.amax(1)).all()


@pytest.mark.slow
@BITS
@given(seed=st.integers(0, 10**6), spread=st.floats(1e-2, 1e3), offset=st.floats(-1e2, 1e2))
@settings(max_examples=30, deadline=None)
def test_quantising_what_was_restored_changes_no_code(bits, seed, spread, offset):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, GROUP, generator=generator) * spread + offset
    codes, scale, minimum = quantize(x, bits, 1)
    again, _, _ = quantize(dequantize(codes, scale, minimum), bits, 1)
    assert torch.equal(again, codes)


@BITS
@DTYPES
@given(st.floats(-6e4, 6e4))
@example(0.1)
@settings(max_examples=10, deadline=None)
def test_a_constant_group_is_exact(bits, dtype, number):
    x = torch.full((2, GROUP), number).to(dtype)
    codes, scale, minimum = quantize(x, bits, 1)
    assert not codes.any() and not scale.any()
    assert torch.equal(dequantize(codes, scale, minimum), x)


@BITS
def test_constant_groups_among_others_are_exact(bits):
    keys, values = entries([32, 48])
    keys[16:, 3] = 0.7
    values[5, GROUP:] = -0.3
    assert torch.equal(PackedKeys.of([keys], bits, GROUP).segment(0)[16:, 3], keys[16:, 3])
    restored = PackedValues.of([values], bits, GROUP).segment(0)
    assert torch.equal(restored[5, GROUP:], values[5, GROUP:])


@BITS
@PACKINGS
@DTYPES
def test_chunks_give_the_codes_of_one_shot(packed, bits, dtype):
    segments = entries([96, 64], dtype)
    whole = packed.of(segments, bits, GROUP)
    chunked = packed.of([segment[:32] for segment in segments], bits, GROUP)
    first = [tensor.clone() for tensor in chunked.select([0]).tensors()]
    for start, stop in ((32, 48), (48, 96)):
        chunk = [segment[start:stop] for segment in segments]
        chunked = chunked.extended(packed.of(chunk, bits, GROUP))
    assert_same(chunked.tensors(), whole.tensors())
    for now, then in zip(chunked.tensors(), first, strict=True):
        assert torch.equal(now[: len(then)], then)


@BITS
@DTYPES
@PACKINGS
def test_packed_bytes_are_the_formula(packed, dtype, bits):
    encoded = packed.of(entries(RAGGED, dtype), bits, GROUP)
    numbers = sum(RAGGED) * SIZE
    width = torch.finfo(dtype).bits
    assert nbytes(encoded) == numbers * (bits + 2 * width / GROUP) / 8


@pytest.mark.parametrize("kind", [PackedKeys, PackedValues])
def test_parts_that_do_not_fit_together_are_refused(kind):
    made = kind.of([torch.randn(64, 32), torch.randn(0, 32)], 4, 32)
    parts = made.named()
    assert torch.equal(kind.from_named(parts, 4, 32).rows, made.rows)
    for name, damage in (
        ("minimum", lambda rows: rows[:1]),
        ("minimum", torch.Tensor.bfloat16),
        ("scale", lambda rows: rows[:1]),
        ("words", torch.Tensor.long),
        ("words", lambda rows: rows[:, :1]),
    ):
        damaged = {**parts, name: [damage(parts[name][0]), *parts[name][1:]]}
        with pytest.raises(ValueError, match="do not fit together"):
            kind.from_named(damaged, 4, 32)
