# SPDX-License-Identifier: Apache-2.0
"""Entries quantized one by one, against TurboQuant's formulas and hand-computed numbers."""

import pytest
import torch

from kvfold import KvfoldError
from kvfold.kernels.codebook import unpacked
from kvfold.kernels.per_token import RotatedKeys, TokenValues, quantized_keys
from tests.helpers.encoded import assert_same, entries

ROW = [1.0, -2.0, 3.0, 0.0, 0.5, -1.0, 2.0, 4.0]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
ERROR = {2: 0.117482, 3: 0.034548, 4: 0.009501}  # mean squared, of a unit Gaussian


def keys_of(rows, bits=4, correct=True):
    return RotatedKeys.of([rows], bits, correct, [0])


def gaussian(count, size, seed=0):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("correct", "decoded"),
    [
        (False, [1.456980, -1.456980, 3.026824, 0.112864, -0.112864, 0.112864, 1.456980, 4.370940]),
        (True, [1.469045, -1.469045, 3.051889, 0.113798, -0.113798, 0.113798, 1.469045, 4.407136]),
    ],
)
def test_a_key_is_that_of_the_formula(correct, decoded):
    encoded = keys_of(torch.tensor([ROW]), 2, correct)
    assert unpacked(encoded.codes.rows, 2).tolist() == [[3, 2, 0, 2, 1, 3, 2, 1]]
    # Lengths are stored in float16, of 11 bits.
    torch.testing.assert_close(encoded.rows, torch.tensor([decoded]), rtol=2**-11, atol=0)


def test_a_value_is_that_of_the_formula():
    encoded = TokenValues.of([torch.tensor([ROW])], 4, [0])
    assert unpacked(encoded.codes.rows, 4).tolist() == [[8, 0, 13, 5, 6, 3, 10, 15]]
    expected = torch.tensor([[1.2, -2, 3.2, 0, 0.4, -0.8, 2, 4]])
    torch.testing.assert_close(encoded.rows, expected, rtol=0, atol=15 * 0.4 * 2**-11)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("size", [256, 512])
def test_gaussian_keys_lose_what_the_table_says(bits, size):
    """Smaller heads lose less: their directions are less free than as many Gaussian numbers."""
    keys = gaussian(3000, size)
    lost = (keys_of(keys, bits, correct=False).rows - keys).square().sum() / keys.square().sum()
    assert lost.item() == pytest.approx(ERROR[bits], rel=0.01 + 2.5 / size)
    small = gaussian(3000, 64)
    assert (keys_of(small, bits).rows - small).square().sum() < ERROR[bits] * small.square().sum()


@DTYPES
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_corrected_keys_keep_their_length(bits, dtype):
    (keys,) = entries([40], dtype)
    lengths = [rows.double().norm(dim=1) for rows in (keys_of(keys, bits).rows, keys)]
    tolerance = 2**-11 + torch.finfo(dtype).eps
    torch.testing.assert_close(*lengths, rtol=tolerance, atol=0)


def test_products_need_no_key_turned_back():
    from kvfold.kernels.codebook import centroids, rotated

    keys, query = gaussian(20, 64), gaussian(3, 64, seed=1)
    encoded = keys_of(keys)
    table = centroids(4, torch.float32, torch.device("cpu"))
    levels = table[unpacked(encoded.codes.rows, 4).int()]
    products = rotated(query) @ levels.T * encoded.scales.rows.T
    torch.testing.assert_close(products, query @ encoded.rows.T, atol=1e-4, rtol=1e-5)


def test_fp8_keys_have_a_scale_of_their_own():
    keys = gaussian(50, 64) * torch.logspace(-4, 4, 50)[:, None]
    encoded = keys_of(keys, bits=8)
    assert encoded.codes.rows.shape == (50, 64) and encoded.scales.rows.shape == (50, 1)
    error = (encoded.rows - keys).abs() / keys.abs().amax(1, keepdim=True)
    assert error.max() <= 2**-4  # 3 bits of the largest number
    assert encoded.rows.isfinite().all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_nothing_but_zeros_stays_zero(bits):
    assert torch.equal(keys_of(torch.zeros(3, 16), bits).rows, torch.zeros(3, 16))


def test_constant_values_stay_constant():
    rows = torch.tensor([0.0, 2.5, -1000.0, 1e-9])[:, None].expand(4, 16).contiguous()
    torch.testing.assert_close(TokenValues.of([rows], 4, [0]).rows, rows, rtol=2**-11, atol=1e-8)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_nan_stays_with_its_entry(bits):
    rows = gaussian(5, 16)
    rows[2, 3] = torch.nan
    for encoded in (keys_of(rows, bits), TokenValues.of([rows], min(bits, 4), [0])):
        nan = encoded.rows.isnan()
        assert nan[2].any() and not nan[[0, 1, 3, 4]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_float16_cannot_hold_is_refused(dtype):
    rows = gaussian(4, 16).to(dtype)
    rows[1, 2] = 1e8
    for bits in (4, 8):
        with pytest.raises(KvfoldError, match="float16, and keys of this model are too large"):
            keys_of(rows, bits)
    with pytest.raises(KvfoldError, match=r"values of this model are too large.*choose kivi"):
        TokenValues.of([rows], 4, [0])


def test_keys_of_float16_may_be_as_large_as_it_goes():
    rows = (gaussian(2, 64).sign() * 60000).half()
    got = keys_of(rows).rows
    assert got.isfinite().all()
    lost = (got.double() - rows.double()).square().sum() / rows.double().square().sum()
    assert lost < 0.012


def test_the_first_entries_of_a_segment_stay_whole():
    segments = entries([6, 3, 0, 9])
    for encoded in (
        RotatedKeys.of(segments, 3, True, [2, 3, 0, 0]),
        TokenValues.of(segments, 3, [2, 3, 0, 0]),
    ):
        assert encoded.lengths == [6, 3, 0, 9]
        assert encoded.codes.lengths == [4, 0, 0, 9]
        for i, (segment, count) in enumerate(zip(segments, [2, 3, 0, 0], strict=True)):
            assert torch.equal(encoded.segment(i)[:count], segment[:count])
            assert not torch.equal(encoded.segment(i)[count:], segment[count:]) or i in (1, 2)
        assert_same(list(encoded.segments), [encoded.segment(i) for i in range(4)])
        assert torch.equal(encoded.rows, torch.cat(encoded.segments))


def test_any_entries_are_kept_as_they_were():
    segments = entries([6, 3, 4])
    kept = [torch.tensor([0, 2, 5]), torch.tensor([], dtype=torch.long), torch.tensor([1, 3])]
    for encoded in (
        RotatedKeys.of(segments, 4, True, [2, 3, 0]),
        TokenValues.of(segments, 4, [2, 3, 0]),
    ):
        fewer = encoded.kept(kept)
        assert fewer.lengths == [3, 0, 2] and fewer.whole.lengths == [1, 0, 0]
        assert_same(list(fewer.segments), [encoded.segment(i)[at] for i, at in enumerate(kept)])


def test_codes_of_another_table_are_refused():
    encoded = RotatedKeys.of(entries([6, 3]), 3, True, [2, 0])
    parts = encoded.named()
    assert torch.equal(RotatedKeys.from_named(parts, 3).rows, encoded.rows)
    assert [len(table) for table in parts["table"]] == [8, 8]
    parts["table"][1][0] += 1e-4
    with pytest.raises(KvfoldError, match="another table than kvfold's of 3 bits"):
        RotatedKeys.from_named(parts, 3)


def test_half_precision_is_quantized_in_full():
    rows = gaussian(50, 64).bfloat16()
    codes, scale = quantized_keys(rows, 4, True)
    exact_codes, exact_scale = quantized_keys(rows.double(), 4, True)
    assert (codes != exact_codes).float().mean() < 1e-3 and torch.equal(scale, exact_scale)


@pytest.mark.parametrize("make", [lambda *a: RotatedKeys.of(a[0], 4, False, a[1]), None])
def test_codes_are_taken_from_where_they_were(make):
    """An entry has the codes that it had, if it is quantized here and was there."""
    make = make or (lambda rows, whole: TokenValues.of(rows, 4, whole))
    old = make([gaussian(9, 16, seed=2), gaussian(6, 16, seed=3)], [2, 1])
    rows, places = [gaussian(5, 16), gaussian(4, 16, seed=1)], [[-1, 0, 1, 5, 8], [3, 4, -1, 2]]
    new = make(rows, [1, 2])
    made = new.with_codes_of(old, [torch.tensor(at) for at in places])
    for i, at in enumerate(places):
        for entry, place in enumerate(at):
            both_quantized = entry >= (1, 2)[i] and place >= (2, 1)[i]
            expected = old.segment(i)[place] if both_quantized else new.segment(i)[entry]
            assert torch.equal(made.segment(i)[entry], expected)
    assert torch.equal(new.rows, make(rows, [1, 2]).rows)  # is not changed itself


@pytest.mark.parametrize("kind", [RotatedKeys, TokenValues])
def test_parts_that_do_not_fit_together_are_refused(kind):
    rows = [torch.randn(20, 32), torch.randn(3, 32)]
    made = (
        RotatedKeys.of(rows, 4, True, [2, 3])
        if kind is RotatedKeys
        else TokenValues.of(rows, 4, [2, 3])
    )
    parts = made.named()
    assert torch.equal(kind.from_named(parts, 4).rows, made.rows)
    for name, damage in (
        ("scales", torch.Tensor.float),
        ("scales", lambda rows: rows[:1]),
        ("codes", torch.Tensor.int),
        ("codes", lambda rows: rows[:, :1]),
        ("codes", lambda rows: rows[:1]),
    ):
        damaged = {**parts, name: [damage(parts[name][0]), *parts[name][1:]]}
        with pytest.raises(ValueError, match="do not fit together"):
            kind.from_named(damaged, 4)
