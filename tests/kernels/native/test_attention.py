# SPDX-License-Identifier: Apache-2.0
"""Attention in C++ to quantized entries, against the numbers that they stand for."""

import pytest
import torch

from kvfold.kernels.native.attention import (
    PART,
    _table,
    attend_to_packed,
    attend_to_per_token,
    attend_to_raw,
    find_cold,
)
from kvfold.kernels.native.library import library
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.views import Flat
from kvfold.store.recalled import Recalling
from tests.helpers.gpu_inputs import SCALE, assert_close, attended, noise, packed, segments

pytestmark = pytest.mark.usefixtures("instructions", "poison")
GROUPS = pytest.mark.parametrize("groups", [1, 3, 8])
SIZES = pytest.mark.parametrize("size", [32, 40, 64, 128])
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"]
)
KNOWN = ["DEFAULT", "AVX2", "AVX512"]
LENGTHS, SINKS = [0, 1, 31, 32, 0, 300], [0, 1, 2, 0, 0, 4]
KEY_LENGTHS, VALUE_LENGTHS = [0, 64, 64, 128, 0, 320], [0, 1, 63, 96, 40, 300]


@pytest.fixture(params=KNOWN, scope="module")
def instructions(request):
    """The library for instructions that every CPU has, and for those of most."""
    own = torch.backends.cpu.get_cpu_capability()
    known = KNOWN[: KNOWN.index(own) + 1] if own in KNOWN else KNOWN[:1]
    if request.param not in known:
        pytest.skip(f"no {request.param}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
        library.cache_clear()
        if library() is None:
            pytest.skip("no C++ compiler")
        yield
    library.cache_clear()


def per_token(lengths, bits, size, dtype, value_size=None, sinks=SINKS):
    """Quantized keys and values of segments; the first entries of some are whole, and left out."""
    keys = RotatedKeys.of(segments(lengths, size, 100, dtype), bits[0], True, sinks)
    values = TokenValues.of(segments(lengths, value_size or size, 200, dtype), bits[1], sinks)
    return keys, values


def check_per_token(query, keys, values, softcap=None):
    out, lse = attend_to_per_token(query, keys, values, SCALE, softcap)
    decoded = [part.decoded.split(part.codes.lengths) for part in (keys, values)]
    check(query, out, lse, attended(query, *decoded, softcap))


def check(query, out, lse, expected):
    tolerance = 1e-5 if query.dtype == torch.float32 else 2e-2
    assert out.dtype == query.dtype
    torch.testing.assert_close(out.double(), expected[0], rtol=tolerance, atol=tolerance)
    assert_close(lse, expected[1], tolerance=3 * tolerance)


@GROUPS
@SIZES
@DTYPES
@pytest.mark.parametrize("bits", [(2, 3), (3, 4), (4, 2), (8, 4)], ids=str)
def test_entries_quantized_alone_are_attended_to_as_they_are_decoded(groups, size, bits, dtype):
    query = noise(len(LENGTHS), groups, size, seed=1, dtype=dtype)
    check_per_token(query, *per_token(LENGTHS, bits, size, dtype), 2.0 if groups == 3 else None)


def test_values_of_another_head_size():
    query = noise(len(LENGTHS), 2, 64, seed=1)
    check_per_token(query, *per_token(LENGTHS, (4, 3), 64, torch.float32, value_size=40))
    check_per_token(query, *per_token(LENGTHS, (3, 4), 64, torch.float32, value_size=128))


def test_large_logits_and_large_values_are_weighed_exactly():
    keys, values = per_token(LENGTHS, (4, 4), 32, torch.float32)
    query = 100 * noise(len(LENGTHS), 2, 32, seed=1)
    out, lse = attend_to_per_token(query, keys, values, SCALE)
    decoded = [part.decoded.split(part.codes.lengths) for part in (keys, values)]
    expected = attended(query, *decoded)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-3)


def test_long_segments_are_cut_and_any_number_of_threads_gives_the_same_bits():
    lengths = [PART, PART + 1, 3 * PART - 1, 5]
    keys, values = per_token(lengths, (4, 4), 32, torch.float32, sinks=[0] * 4)
    query, threads = noise(4, 2, 32, seed=1), torch.get_num_threads()
    check_per_token(query, keys, values)
    outs = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outs.append(attend_to_per_token(query, keys, values, SCALE))
    finally:
        torch.set_num_threads(threads)
    for out, lse in outs[1:]:
        assert torch.equal(out, outs[0][0]) and torch.equal(lse, outs[0][1])


def test_nothing_quantized_is_nothing_attended_to():
    keys, values = per_token([0, 0], (4, 4), 32, torch.float32, sinks=[0, 0])
    out, lse = attend_to_per_token(noise(2, 3, 32, seed=1), keys, values, SCALE)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_and_autocast_change_nothing(dtype):
    keys, values = per_token(LENGTHS, (4, 4), 32, torch.float32)
    query = noise(len(LENGTHS), 2, 32, seed=1)
    expected = attend_to_per_token(query, keys, values, SCALE)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    _table.cache_clear()
    try:
        got = attend_to_per_token(query, keys, values, SCALE)
        with torch.autocast("cpu", torch.bfloat16):
            near = attend_to_per_token(query, keys, values, SCALE)
    finally:
        torch.set_default_dtype(before)
        _table.cache_clear()
    for one, other, short in zip(got, expected, near, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(short, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_stay_so(number):
    keys = packed([32, 32], 32, 4, 32, True, torch.float16, 100)[0]
    values = packed([32, 32], 32, 4, 32, False, torch.float16, 200)[0]
    values.scale.rows[3] = number
    out, _ = attend_to_packed(noise(2, 2, 32, seed=1, dtype=torch.float16), keys, values, SCALE)
    assert not out[0].isfinite().any() and out[1].isfinite().all()


def check_packed(query, keys, values, softcap=None):
    (packed_keys, key_numbers), (packed_values, value_numbers) = keys, values
    out, lse = attend_to_packed(query, packed_keys, packed_values, SCALE, softcap)
    common = [
        (key[: len(value)], value[: len(key)])
        for key, value in zip(key_numbers, value_numbers, strict=True)
    ]
    check(query, out, lse, attended(query, *zip(*common, strict=True), softcap))


@pytest.mark.cases(24)
@GROUPS
@pytest.mark.parametrize("size", [32, 64, 128])
@DTYPES
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_entries_are_attended_to_as_the_numbers_they_stand_for(groups, size, bits, dtype):
    """Keys and values have ends of their own."""
    keys = packed(KEY_LENGTHS, size, bits, 32, True, dtype, 100)
    values = packed(VALUE_LENGTHS, size, bits, 32, False, dtype, 200)
    query = noise(len(KEY_LENGTHS), groups, size, seed=1, dtype=dtype)
    check_packed(query, keys, values, 2.0 if groups == 3 else None)


@pytest.mark.parametrize(("key_bits", "value_bits"), [(2, 8), (8, 2), (4, 4)])
@pytest.mark.parametrize("group", [16, 48])
def test_packed_differently(key_bits, value_bits, group):
    """Other groups, other bits for keys and values, head sizes of no power of two."""
    keys = packed([96, 240, 0], 40, key_bits, 48, True, torch.float32, 100)
    values = packed([90, 300, 7], 48, value_bits, group, False, torch.float32, 200)
    check_packed(noise(3, 3, 40, seed=1), keys, values)


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_fewer_channels_than_a_vector_has(bits):
    keys = packed([32, 64], 24, bits, 8, True, torch.float32, 100)
    values = packed([30, 64], 24, bits, 8, False, torch.float32, 200)
    check_packed(noise(2, 2, 24, seed=1), keys, values)


def test_what_is_packed_in_keys_alone_is_not_looked_at():
    keys = packed([96], 32, 4, 32, True, torch.float32, 100)
    keys[0].scale.rows[2] = keys[0].minimum.rows[2] = torch.nan
    values = packed([60], 32, 4, 32, False, torch.float32, 200)
    check_packed(noise(1, 4, 32, seed=1), keys, values)


@GROUPS
@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_entries_that_are_found_have_the_highest_products(groups, size, bits):
    """Of a float64 product with what each entry's code stands for."""
    lengths = [1, 30, 35, 700]
    keys = Recalling(bits, 0.3).keys(segments(lengths, size, 100, torch.float32), None, None)
    query = noise(len(lengths), groups, size, seed=1).float()
    counts, starts = keys.counts(), (0,) * len(lengths)
    at, read = find_cold(query, keys.codes, keys.places, counts, lengths, starts)
    assert read == counts
    decoded, first = keys.codes.decoded.double().split(lengths), 0
    for own, rows, found in zip(query.double(), decoded, at.split(read), strict=True):
        products = (own @ rows.T).amax(0)
        assert found.tolist() == sorted(set(found.tolist()))
        chosen = torch.zeros(len(rows), dtype=torch.bool).index_fill(0, found - first, True)
        assert products[chosen].min() > products[~chosen].max() - 1e-5 if not chosen.all() else True
        first += len(rows)


# --- raw entries ---------------------------------------------------------------------------------


def raw(lengths, size, value_size, dtype, *, batch=2, heads=3, room=50, slots=37):
    """Segments of old entries, tails in wider buffers, and all entries of each segment."""
    old, both = [], []
    for seed, each in ((100, size), (200, value_size)):
        segments_ = segments(lengths, each, seed, dtype)
        tail = noise(batch, heads, room, each, seed=seed + 50, dtype=dtype)[:, :, :slots]
        old.append(Flat.of(segments_))
        both.append((segments_, tail))
    return tuple(old), both


def whole_of(both, gaps):
    return [
        [torch.cat([old, own[gap:]]) for old, own, gap in zip(*part, gaps, strict=True)]
        for part in ((old, tail.flatten(0, 1)) for old, tail in both)
    ]


@GROUPS
@SIZES
@DTYPES
@pytest.mark.parametrize("gaps", [(0,) * 6, (0, 36, 5, 0, 1, 20)], ids=["even", "uneven"])
def test_raw_segments_and_their_tails_are_attended_to(groups, size, dtype, gaps):
    lengths, softcap = [0, 1, 31, 32, 0, 300], 2.0 if groups == 3 else None
    query = noise(6, groups, size, seed=1, dtype=dtype)
    old, both = raw(lengths, size, size if groups == 1 else 40, dtype)
    keys, values = both[0][1], both[1][1]
    out, lse = attend_to_raw(query, keys, values, gaps, old, SCALE, softcap)
    check(query, out.to(dtype), lse, attended(query, *whole_of(both, gaps), softcap))


@pytest.mark.parametrize("size", [32, 40, 128])
def test_dense_entries_are_attended_to_in_their_buffer(size):
    query = noise(6, 3, size, seed=1)
    old, both = raw([0] * 6, size, size, torch.float32)
    keys, values = both[0][1], both[1][1]
    expected = attended(query, *whole_of(both, (0,) * 6), None)
    check(query, *attend_to_raw(query, keys, values, (0,) * 6, old, SCALE), expected)
    half = tuple(Flat(part.rows, part.lengths[:3]) for part in old)
    first = attend_to_raw(query[:3], keys[:1], values[:1], (0,) * 3, half, SCALE)[0]
    assert torch.equal(first, attend_to_raw(query, keys, values, (0,) * 6, old, SCALE)[0][:3])


@pytest.mark.parametrize("batch, heads", [(3, 1), (1, 1), (1, 3), (3, 2)])
def test_rows_that_do_not_follow_one_another_are_copied(batch, heads):
    """Also where torch calls them contiguous, as one head has no stride of its own."""
    query = noise(batch * heads, 2, 32, seed=1)
    old, both = raw([0] * batch * heads, 32, 32, torch.float32, batch=batch, heads=heads)
    keys, values = both[0][1], both[1][1]
    expected = attended(query, *whole_of(both, (0,) * batch * heads), None)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3), (0, 1, 3, 2)):
        back = [order.index(axis) for axis in range(4)]
        laid = [part.permute(order).contiguous().permute(back) for part in (keys, values)]
        check(query, *attend_to_raw(query, *laid, (0,) * batch * heads, old, SCALE), expected)


def test_long_raw_segments_give_the_same_bits_on_any_number_of_threads():
    lengths, query, threads = (
        [3 * PART - 1, 5, PART],
        noise(3, 2, 32, seed=1),
        torch.get_num_threads(),
    )
    old, both = raw(lengths, 32, 32, torch.float32, batch=1)
    outs = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found = attend_to_raw(query, both[0][1], both[1][1], (0, 1, 2), old, SCALE)
            check(query, *found, attended(query, *whole_of(both, (0, 1, 2)), None))
            outs.append(found)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(out, outs[0][0]) for out, _ in outs)
