# SPDX-License-Identifier: Apache-2.0
"""Pruned channels of keys (ThinK), against loops over single numbers."""

import pytest
import torch

from kvfold import KvfoldError
from kvfold.methods.observation import Observation
from kvfold.store.pruned import PrunedKeys, Pruning, channel_scores, kept_channels
from tests.helpers.encoded import entries, nbytes

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def watch(lengths, groups=2, seed=3):
    """Rows of 2 KV heads, `lengths` tokens each, padded on the left with loud nonsense."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, window, seen, size = len(lengths), 2, 8, 24, 8
    places = torch.arange(seen) - (seen - torch.tensor(lengths))[:, None]
    places = places.masked_fill(places < 0, -1)
    padding = (places < 0)[:, None, :, None]
    queries = torch.randn(batch, heads * groups, seen, size, generator=generator)
    keys = torch.randn(batch, heads, seen, size, generator=generator).masked_fill(padding, 40.0)
    return Observation(
        keys,
        keys,
        places[:, None].expand(batch, heads, seen),
        queries.masked_fill(padding, 40.0)[:, :, -window:],
        places[:, -window:],
    )


def brute_force_scores(queries, keys):
    """Mean over a group's queries `[G][W]` and the keys of (q_j · k_j)², for each channel."""
    pairs = [(q, k) for head in queries.tolist() for q in head for k in keys.tolist()]
    return [sum((q[j] * k[j]) ** 2 for q, k in pairs) / len(pairs) for j in range(keys.shape[1])]


def test_channels_of_the_golden_example():
    q = torch.tensor([[[[1.0, 2, 0, 1], [1, 0, 1, 1]]]])
    k = torch.tensor([[[[1.0, 1, 3, 0], [2, 0, 1, 1], [0, 1, 1, 2]]]])
    seen = Observation(k, k, torch.arange(3).view(1, 1, 3), q, torch.tensor([[1, 2]]))
    scores = channel_scores(seen, 32)
    assert scores[0, 0].tolist() == pytest.approx([10 / 6, 8 / 6, 11 / 6, 10 / 6])
    assert kept_channels(scores, 0.25).tolist() == [[[0, 2, 3]]]


@pytest.mark.parametrize("groups", [1, 4])
def test_scores_are_the_frobenius_norms_of_a_loop(groups):
    lengths = [24, 19, 5]  # the last row has less tokens than the window has queries
    seen = watch(lengths, groups)
    scores = channel_scores(seen, 6)
    for row, length in enumerate(lengths):
        for head in range(2):
            queries = seen.queries[row, head * groups : (head + 1) * groups]
            queries = queries[:, -min(6, length) :]
            expected = brute_force_scores(queries, seen.keys[row, head, -length:])
            assert scores[row, head].tolist() == pytest.approx(expected, rel=1e-5)


def test_of_equal_channels_the_earlier_stay():
    assert kept_channels(torch.ones(5), 0.4).tolist() == [0, 1, 2]
    assert kept_channels(torch.tensor([2.0, 1, 3, 1, 1]), 0.4).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("size", "ratio", "kept"), [(128, 0.4, 77), (32, 0.0, 32), (8, 0.99, 1)])
def test_the_number_of_channels_is_rounded_up(size, ratio, kept):
    assert len(kept_channels(torch.rand(size), ratio)) == kept


@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_pruned_keys_are_zero_in_pruned_channels_only(ratio):
    seen = watch([24, 19])
    segments = [keys[-n:] for keys, n in zip(seen.keys.flatten(0, 1), (20, 3, 0, 15), strict=True)]
    pruned = Pruning(ratio=ratio, queries=6).keys(segments, seen, None)
    kept = kept_channels(channel_scores(seen, 6), ratio).flatten(0, 1).tolist()
    assert pruned.channels.tolist() == kept
    for i, keys in enumerate(segments):
        expected = torch.zeros_like(keys)
        for j in kept[i]:
            expected[:, j] = keys[:, j]
        assert torch.equal(pruned.segment(i), expected)
        assert ratio > 0 or torch.equal(expected, keys)


def test_logits_lose_just_the_pruned_channels():
    seen = watch([24])
    keys = seen.keys[0, 0]
    pruned = Pruning().keys(list(seen.keys[0]), seen, None)
    query, gone = seen.queries[0, 0, -1], torch.ones(8, dtype=torch.bool)
    gone[pruned.channels[0].long()] = False
    lost = keys[:, gone] @ query[gone]
    torch.testing.assert_close(pruned.segment(0) @ query, keys @ query - lost)


def test_channels_stay_once_they_are_chosen():
    pruning, first, later = Pruning(queries=8), watch([24]), watch([24], seed=4)
    fresh = pruning.keys(list(later.keys[0]), later, None)
    # Segment 1 has no pruned keys yet, so its channels are still open.
    earlier = pruning.keys([first.keys[0, 0], first.keys[0, 1, :0]], first, None)
    assert (earlier.channels != fresh.channels).any(1).all()
    new = pruning.keys(list(later.keys[0]), later, earlier)
    assert new.channels.tolist() == [earlier.channels[0].tolist(), fresh.channels[1].tolist()]
    both = earlier.extended(new)
    assert torch.equal(both.segment(0), torch.cat([earlier.segment(0), new.segment(0)]))
    assert torch.equal(both.segment(1), new.segment(1))


def test_recent_keys_and_generated_ones_stay_whole():
    pruning = Pruning(recent=32)
    for count in (pruning.key_count, pruning.value_count):
        assert count(100, 0, False) == 68
        assert count(20, 0, False) == 0
        assert count(100, 80, False) == 80
        assert count(500, 68, True) == 68
    assert not pruning.raw


@DTYPES
def test_pruning_saves_its_share_of_the_keys(dtype):
    segments = entries([100, 0, 60], dtype, size=128)
    channels = torch.arange(77, dtype=torch.int32).expand(3, 77).clone()
    keys, values = PrunedKeys.of(segments, channels), Pruning().values(segments)
    width = dtype.itemsize
    assert nbytes(keys) == 160 * 77 * width + 3 * 77 * 4
    assert nbytes(values) == 160 * 128 * width


@pytest.mark.parametrize(
    "options", [{"ratio": 1.0}, {"ratio": -0.1}, {"recent": -1}, {"queries": 0}]
)
def test_a_pruning_refuses_what_makes_no_sense(options):
    with pytest.raises(KvfoldError, match=str(next(iter(options.values())))):
        Pruning(**options)
