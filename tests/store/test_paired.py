# SPDX-License-Identifier: Apache-2.0
"""Entries shared by two layers (MiniCache), against loops over single numbers."""

import copy
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvfold import KvfoldError
from kvfold.store.paired import Pairing, extend_pair, merge, retained
from tests.helpers.encoded import (
    SIZE,
    assert_same,
    decoded,
    entries,
    nbytes,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def vectors(n, seed=0, size=6):
    """Two layers' entries that are alike, as float64."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(n, size, generator=generator).double()
    return first, first * 1.5 + torch.randn(n, size, generator=generator).double()


def naive_direction(first, second, t):
    """SLERP of two lists of floats."""
    norms = [math.sqrt(sum(x * x for x in vector)) for vector in (first, second)]
    first, second = ([x / n for x in v] for v, n in zip((first, second), norms, strict=True))
    angle = math.acos(sum(a * b for a, b in zip(first, second, strict=True)))
    weights = [math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)]
    return [weights[0] * a + weights[1] * b for a, b in zip(first, second, strict=True)], norms


def test_the_direction_of_the_golden_example():
    first, second = torch.tensor([[3.0, 0, 0]]), torch.tensor([[0.0, 2, 0]])
    direction, *norms = merge(first, second, 0.6)
    assert direction[0].tolist() == pytest.approx([0.587785, 0.809017, 0], abs=1e-6)
    assert [norm.item() for norm in norms] == [3, 2]
    pair = Pairing(gamma=0.0).pair([first], [second])
    assert pair[0].segment(0)[0].tolist() == pytest.approx([1.763356, 2.427051, 0], abs=1e-6)
    assert pair[1].segment(0)[0].tolist() == pytest.approx([1.175571, 1.618034, 0], abs=1e-6)


@pytest.mark.parametrize("t", [0.0, 0.3, 0.6, 1.0])
def test_directions_are_those_of_a_loop(t):
    first, second = vectors(20)
    direction, norm_first, norm_second = merge(first, second, t)
    for i in range(20):
        expected, norms = naive_direction(first[i].tolist(), second[i].tolist(), t)
        assert direction[i].tolist() == pytest.approx(expected, abs=1e-9)
        assert [norm_first[i].item(), norm_second[i].item()] == pytest.approx(norms)
    torch.testing.assert_close(direction.norm(dim=1), torch.ones(20).double())


def test_the_ends_are_the_layers_and_swapping_them_swaps_t():
    first, second = vectors(20)
    ends = [merge(first, second, t)[0] for t in (0.0, 1.0)]
    torch.testing.assert_close(ends[0], first / first.norm(dim=1, keepdim=True))
    torch.testing.assert_close(ends[1], second / second.norm(dim=1, keepdim=True))
    torch.testing.assert_close(merge(first, second, 0.6)[0], merge(second, first, 0.4)[0])


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_parallel_layers_are_restored(seed, factor, t):
    first = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    pair = Pairing(t=t, gamma=0.0).pair([first], [first * factor])
    torch.testing.assert_close(pair[0].segment(0), first, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pair[1].segment(0), first * factor, rtol=1e-4, atol=1e-5 * factor)


@pytest.mark.parametrize("t", [0.0, 0.4, 0.5, 0.6, 1.0])
def test_opposite_and_zero_vectors_keep_their_length(t):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    first = torch.stack([x[0], torch.zeros(8), x[1], torch.zeros(8), x[2]])
    opposite = -2 * x[0] + 1e-4 * x[1]  # a great circle would lead away from both
    second = torch.stack([opposite, x[1], torch.zeros(8), torch.zeros(8), x[2] + 1e-5])
    pair = Pairing(t=t, gamma=0.0).pair([first], [second])
    for encoded, given_entries in zip(pair, (first, second), strict=True):
        restored = encoded.segment(0)
        assert restored.isfinite().all()
        torch.testing.assert_close(restored.norm(dim=1), given_entries.norm(dim=1))
        nearer = first[0] if t <= 0.5 else second[0]
        cosine = torch.nn.functional.cosine_similarity(restored[0], nearer, dim=0)
        assert cosine.item() == pytest.approx(1)
    torch.testing.assert_close(pair[0].segment(0)[2], x[1])
    torch.testing.assert_close(pair[1].segment(0)[1], x[1])


@DTYPES
def test_norms_are_kept(dtype):
    first, second = entries([50], dtype), entries([50], dtype, seed=1)
    for encoded, segments in zip(Pairing().pair(first, second), (first, second), strict=True):
        norms = segments[0].double().norm(dim=1)
        lengths = encoded.shared.rows.segment(0).double().norm(dim=1)
        torch.testing.assert_close(
            encoded.magnitudes.segment(0) * lengths, norms, rtol=1e-6, atol=0.0
        )
        rounding = max(torch.finfo(dtype).eps, 1e-6)
        restored = encoded.segment(0).double().norm(dim=1)
        torch.testing.assert_close(restored, norms, rtol=rounding, atol=0.0)


@given(st.integers(0, 70), st.integers(0, 100))
@example(100, 7)
@settings(max_examples=30, deadline=None)
def test_the_entries_of_largest_angle_are_retained(n, percent):
    first, second = vectors(n, seed=n)
    at = retained(first, second, percent / 100).tolist()
    cosines = torch.nn.functional.cosine_similarity(first, second, dim=1).tolist()
    assert len(at) == -(-percent * n // 100)
    assert at == sorted(sorted(range(n), key=cosines.__getitem__)[: len(at)])


def test_opposite_entries_are_retained_first():
    first, second = vectors(40)
    second[11] = -3 * first[11]
    assert 11 in retained(first, second, 0.01).tolist()


@DTYPES
def test_retained_entries_are_exact_and_all_others_merged(dtype):
    first, second = entries([41, 0, 20], dtype), entries([41, 0, 20], dtype, seed=1)
    pair = Pairing(gamma=0.1).pair(first, second)
    for i in range(3):
        at = retained(first[i], second[i], 0.1)
        assert len(at) == math.ceil(len(first[i]) / 10)
        assert torch.equal(pair[0].segment(i)[at], first[i][at])
        assert torch.equal(pair[1].segment(i)[at], second[i][at])
        merged = torch.ones(len(first[i]), dtype=torch.bool)
        merged[at] = False
        directions = [pair[side].segment(i)[merged].double() for side in (0, 1)]
        cosines = torch.nn.functional.cosine_similarity(*directions, dim=1)
        torch.testing.assert_close(cosines, torch.ones_like(cosines), rtol=0, atol=1e-4)


def shared_of(pair):
    return {t.data_ptr() for t in pair[0].tensors()} & {t.data_ptr() for t in pair[1].tensors()}


@DTYPES
def test_a_pair_costs_the_formula(dtype):
    lengths = [100, 60]
    pair = Pairing().pair(entries(lengths, dtype), entries(lengths, dtype, seed=1))
    width, kept = dtype.itemsize, 5 + 3
    directions, magnitudes = 160 * SIZE * width, 2 * 160 * 4
    assert nbytes(*pair) == directions + magnitudes + kept * 4 + 2 * kept * SIZE * width
    assert len(shared_of(pair)) == 2


def test_a_pair_goes_on_sharing():
    pairing = Pairing(gamma=0.1)
    old = pairing.pair(entries([40, 30]), entries([40, 30], seed=1))
    new = pairing.pair(entries([20, 0], seed=2), entries([20, 0], seed=3))
    grown = extend_pair(*old, *new)
    assert len(shared_of(grown)) == 2
    assert len(shared_of(copy.deepcopy(grown))) == 2
    for side in (0, 1):
        assert_same(decoded(grown[side]), decoded(old[side].extended(new[side])))
    assert not shared_of((old[0].select([0]), old[1].select([0])))


def test_only_equal_segments_are_paired():
    with pytest.raises(KvfoldError, match="same entries"):
        Pairing().pair(entries([3]), entries([4]))


def test_a_turn_is_paired_whole_and_generated_entries_in_blocks():
    pairing = Pairing(block=64)
    for count in (pairing.key_count, pairing.value_count):
        assert count(100, 0, False) == 100
        assert count(163, 100, True) == 128
        assert count(120, 100, True) == 100
        assert count(10, 0, True) == 0
    assert pairing.pairs and not pairing.raw


@pytest.mark.parametrize(
    ("layers", "start", "paired"),
    [
        (4, 0.5, [2, 3]),
        (32, 0.5, list(range(16, 32))),
        (6, 0.5, [3, 4]),
        (5, 0.5, [2, 3]),
        (4, 0.0, [0, 1, 2, 3]),
        (1, 0.0, []),
        (4, 1.0, []),
    ],
)
def test_layers_are_paired_from_the_start_on(layers, start, paired):
    pairing = Pairing(start=start)
    of_layers = [pairing.of_layer(layer, layers) for layer in range(layers)]
    assert [layer for layer in range(layers) if of_layers[layer] is pairing] == paired
    assert of_layers.count(None) == layers - len(paired)


@pytest.mark.parametrize("options", [{"t": 1.5}, {"gamma": -0.1}, {"start": 2.0}, {"block": 0}])
def test_a_pairing_refuses_what_makes_no_sense(options):
    with pytest.raises(KvfoldError, match=str(next(iter(options.values())))):
        Pairing(**options)
