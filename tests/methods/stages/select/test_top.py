# SPDX-License-Identifier: Apache-2.0
"""Selection: the highest scores, the earlier of equals, and whatever is forced to stay."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.methods.stages.select.top import highest, top


def best(scores, count, width):
    """Slots of the `count` highest of a list of scores, with −1 on the left up to `width`."""
    kept: list[int] = []
    for _ in range(count):
        left = [slot for slot in range(len(scores)) if slot not in kept]
        winner = left[0]
        for slot in left:
            if scores[slot] > scores[winner]:
                winner = slot
        kept.append(winner)
    return [-1] * (width - count) + sorted(kept)


def expected(scores, counts):
    width = int(counts.max())
    rows = zip(scores.tolist(), counts.tolist(), strict=True)
    return [[best(head, count, width) for head in heads] for heads, count in rows]


@st.composite
def scores_and_counts(draw):
    """Few different values, so that ties are the rule; infinities as forced and padding have."""
    batch, heads, stored = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 9))
    value = st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 1.0, math.inf])
    size = batch * heads * stored
    scores = torch.tensor(draw(st.lists(value, min_size=size, max_size=size)))
    counts = draw(st.lists(st.integers(0, stored), min_size=batch, max_size=batch))
    return scores.view(batch, heads, stored), torch.tensor(counts)


@given(scores_and_counts())
@settings(max_examples=50, deadline=None)
def test_top_is_the_naive_loop(drawn):
    scores, counts = drawn
    assert top(scores, counts).tolist() == expected(scores, counts)


@given(scores_and_counts())
@settings(max_examples=50, deadline=None)
def test_a_mask_marks_the_same_entries(drawn):
    scores, counts = drawn
    marked = highest(scores, counts)
    per_head = highest(scores, counts[:, None].expand(scores.shape[:2]))
    assert torch.equal(marked, per_head)
    for mask, slots in zip(marked.flatten(0, 1), top(scores, counts).flatten(0, 1), strict=True):
        assert mask.nonzero()[:, 0].tolist() == slots[slots >= 0].tolist()


@given(scores_and_counts())
@settings(max_examples=50, deadline=None)
def test_evicting_one_is_the_naive_loop(drawn):
    scores, _ = drawn
    counts = torch.full((len(scores),), scores.shape[-1] - 1)
    assert top(scores, counts).tolist() == expected(scores, counts)


def test_evicting_one_agrees_with_a_batch_that_takes_the_general_path():
    scores = torch.randint(0, 4, (2, 3, 50), generator=torch.Generator().manual_seed(0)).float()
    fast = top(scores, torch.tensor([49, 49]))
    general = top(torch.cat([scores, scores[:1]]), torch.tensor([49, 49, 48]))
    assert torch.equal(fast, general[:2])


def test_of_equal_scores_the_earlier_positions_stay():
    assert top(torch.zeros(1, 1, 6), torch.tensor([3])).tolist() == [[[0, 1, 2]]]
    assert top(torch.zeros(1, 1, 6), torch.tensor([5])).tolist() == [[[0, 1, 2, 3, 4]]]
    tied = torch.tensor([[[1.0, 2.0, 1.0, 3.0, 1.0]]])
    assert top(tied, torch.tensor([3])).tolist() == [[[0, 1, 3]]]


def test_large_ties_are_broken_by_position_too():
    scores = (torch.arange(5000) % 3).float().view(1, 1, -1)
    slots = top(scores, torch.tensor([2000]))[0, 0]
    twos, ones = torch.arange(2, 5000, 3), torch.arange(1, 5000, 3)
    assert torch.equal(slots, torch.cat([twos, ones[: 2000 - len(twos)]]).sort().values)


def test_rows_that_keep_fewer_have_holes_on_the_left():
    scores = torch.tensor([[[5.0, 1.0, 4.0, 3.0]], [[1.0, 2.0, 3.0, 4.0]]])
    assert top(scores, torch.tensor([3, 1])).tolist() == [[[0, 2, 3]], [[-1, -1, 3]]]


def test_nothing_and_everything_can_be_kept():
    scores = torch.tensor([[[5.0, 1.0, 4.0]]])
    assert top(scores, torch.tensor([3])).tolist() == [[[0, 1, 2]]]
    assert top(scores, torch.tensor([0])).shape == (1, 1, 0)
    assert top(scores[..., :1], torch.tensor([0])).shape == (1, 1, 0)
