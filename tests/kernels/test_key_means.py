# SPDX-License-Identifier: Apache-2.0
"""Means of keys before RoPE: when they are left out of codes, and that none is lost."""

import math

import pytest
import torch

from kvfold.kernels.key_means import KeyMeans, share_a_bias, shared_mean
from kvfold.kernels.per_token import RotatedKeys
from kvfold.kernels.views import Flat

SIZE = 32
PAIRS = {
    "halves": [(i, i + SIZE // 2) for i in range(SIZE // 2)],
    "neighbours": [(i, i + 1) for i in range(0, SIZE, 2)],
    "part": [(i, i + 4) for i in range(4)],
    "no RoPE": [],
}
LAYOUTS = pytest.mark.parametrize("layout", PAIRS)


def gaussian(n, size=SIZE, seed=0):
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed))


def turned(keys, positions, layout="halves"):
    """Keys by RoPE of base 10,000, a loop over keys and pairs of channels."""
    rows, pairs = keys.double().clone(), PAIRS[layout]
    for position, row in zip(positions, rows, strict=True):
        for number, (one, other) in enumerate(pairs):
            angle = position * 10_000.0 ** (-number / len(pairs))
            cos, sin = math.cos(angle), math.sin(angle)
            a, b = row[one].item(), row[other].item()
            row[one], row[other] = a * cos - b * sin, a * sin + b * cos
    return rows.to(keys.dtype)


def rotate(keys, shift):
    """`turned` as a store calls it: keys `[1, 1, n, D]` by `shift [1, n]`."""
    return turned(keys[0, 0], shift[0].tolist())[None, None]


@pytest.mark.slow
@LAYOUTS
def test_a_bias_is_seen_behind_an_unknown_rope(layout):
    """At any pair's frequency; 4 bits then lose more than half of what keys do not share."""
    if layout == "part":
        pytest.skip("pairs of channels are halves or neighbours where nothing is known")
    plain = gaussian(60)
    for channel in (0, 7, 20, 31):
        biased = plain.clone()
        biased[:, channel] += 100
        rows = turned(biased, range(60), layout)
        assert share_a_bias(rows) and share_a_bias(rows.bfloat16())
        lost = RotatedKeys.of([rows], 4, True, [0]).rows - rows
        assert lost.square().sum() > 0.5 * plain.square().sum()
    assert not share_a_bias(turned(plain, range(60), layout))


def test_few_keys_do_not_tell_of_a_bias():
    for biased, least in ((share_a_bias, 24), (lambda rows: bool(shared_mean(rows).any()), 4)):
        assert not biased(gaussian(least - 1) + 100) and biased(gaussian(least) + 100)
        assert not biased(gaussian(0)) and not biased(torch.zeros(40, SIZE))


def test_a_mean_is_left_out_where_keys_share_more_than_they_differ_by():
    keys = gaussian(500)
    for bias in (5.0, 6.2):  # squared 25 and 38 beside a variance of 1 in each channel
        mean = shared_mean(keys + bias)
        assert torch.equal(mean, (keys + bias).mean(0) if bias > 6 else torch.zeros(SIZE))


@LAYOUTS
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_codes_beside_a_mean_lose_what_those_of_the_differences_lose(layout, bits, dtype):
    """Of 200 in some channels nothing is lost, in any order of positions."""
    differences, bias = gaussian(50).to(dtype), torch.zeros(SIZE, dtype=dtype)
    bias[[0, 5, 21, 30]] = 200
    positions = torch.randperm(900, generator=torch.Generator().manual_seed(1))[:50]
    means = turned(bias.expand(50, -1), positions, layout)
    keys = means + differences

    def by_layout(rows, shift):
        return turned(rows[0, 0], shift[0].tolist(), layout)[None, None]

    wide = bias.to(torch.promote_types(dtype, torch.float32))[None]
    kept = KeyMeans(wide, Flat(positions[3:, None].int(), [47]), by_layout)
    encoded = RotatedKeys.of([keys], bits, True, [3], kept)
    assert encoded.rows.dtype == dtype
    lost = (encoded.rows - keys).double().norm()
    expected = (RotatedKeys.of([differences], bits, True, [3]).rows - differences).double().norm()
    rounding = 200 * torch.finfo(dtype).eps * keys.numel() ** 0.5
    assert lost < 1.1 * expected + rounding + 1e-3 and encoded.rows[:3].equal(keys[:3])
    assert torch.equal(encoded.segment(0), encoded.rows)
    query = gaussian(6, seed=3).to(dtype)[None]
    exact = query.double() @ encoded.rows.double().T
    products = encoded.products(query).double()
    assert (products - exact).norm() < (0.01 if dtype == torch.bfloat16 else 1e-5) * exact.norm()


def test_means_follow_their_segments_and_keys():
    rows = torch.stack([torch.full((SIZE,), 100.0), torch.zeros(SIZE), torch.full((SIZE,), -50.0)])
    lengths = [4, 3, 5]
    places = Flat(torch.arange(12)[:, None].int() * 7, lengths)
    keys = [
        turned(mean + gaussian(n, seed=i), place[:, 0].tolist())
        for i, (mean, n, place) in enumerate(zip(rows, lengths, places.segments, strict=True))
    ]
    encoded = RotatedKeys.of(keys, 4, True, [1, 0, 2], KeyMeans(rows, Flat.of(
        [place[count:] for place, count in zip(places.segments, [1, 0, 2], strict=True)]
    ), rotate))  # fmt: skip
    before = [each.clone() for each in encoded.segments]
    at = [torch.tensor(each) for each in ([0, 3], [1], [1, 2, 4])]
    kept = encoded.kept(at)
    for mine, whole, chosen in zip(kept.segments, before, at, strict=True):
        assert torch.equal(mine, whole[chosen])
    turned_around = kept.select([2, 0])
    assert torch.equal(turned_around.segment(0), before[2][at[2]])
    both = kept.extended(encoded.kept([torch.tensor([1, 2]), torch.tensor([2]), torch.tensor([4])]))
    for mine, old, new, chosen in zip(
        both.segments, kept.segments, before, ([1, 2], [2], [4]), strict=True
    ):
        assert torch.equal(mine, torch.cat([old, new[chosen]]))
    loaded = RotatedKeys.from_named(both.named(), 4, rotate)
    assert all(map(torch.equal, loaded.segments, both.segments))
    held = {tensor.data_ptr() for tensor in both.tensors()}
    assert {both.means.rows.data_ptr(), both.means.positions.rows.data_ptr()} < held


def test_codes_beside_no_mean_are_followed_by_those_beside_one():
    plain, keys = gaussian(9), gaussian(5, seed=1) + 100
    alone = RotatedKeys.of([plain, plain[:0]], 4, True, [0, 0])
    rows = torch.stack([torch.zeros(SIZE), torch.full((SIZE,), 100.0)])
    means = KeyMeans(rows, Flat(torch.zeros(5, 1).int(), [0, 5]), rotate)
    later = RotatedKeys.of([plain[:0], keys], 4, True, [0, 0], means)
    both = alone.extended(later)
    assert torch.equal(both.segment(0), alone.segment(0))
    assert torch.equal(both.segment(1), later.segment(1))


def test_codes_beside_another_mean_are_not_taken_over():
    keys = gaussian(6) + 100
    places = Flat(torch.zeros(6, 1).int(), [6])
    first, second = (
        RotatedKeys.of([keys], 4, True, [0], KeyMeans(torch.full((1, SIZE), by), places, rotate))
        for by in (100.0, 101.0)
    )
    every = [torch.arange(6)]
    assert torch.equal(second.with_codes_of(first, every).rows, second.rows)
    assert torch.equal(first.with_codes_of(first, every).rows, first.rows)


@pytest.mark.parametrize(
    "change",
    [
        {"means": [torch.full((SIZE,), math.nan)]},
        {"means": [torch.zeros(SIZE - 1)]},
        {"positions": [torch.zeros(5, 1).int()]},
        {"positions": [torch.zeros(6, 1).long()]},
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_are_refused(change):
    places = Flat(torch.zeros(6, 1).int(), [6])
    means = KeyMeans(torch.full((1, SIZE), 100.0), places, rotate)
    named = RotatedKeys.of([gaussian(6) + 100], 4, True, [0], means).named()
    assert RotatedKeys.from_named(named, 4, rotate).lengths == [6]
    for parts, turns in ((named | change, rotate), (named, None)):
        with pytest.raises(ValueError, match="do not fit"):
            RotatedKeys.from_named(parts, 4, turns)
