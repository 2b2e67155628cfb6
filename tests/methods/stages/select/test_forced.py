# SPDX-License-Identifier: Apache-2.0
"""Entries that are forced to stay: sinks, recent tokens and protected spans."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.methods.stages.select.forced import Forced, Share
from kvfold.methods.stages.select.top import top, with_forced


def naive_mask(forced, positions, counts):
    """Row by row, head by head, one entry after the other."""
    mask = torch.zeros(positions.shape, dtype=torch.bool)
    for row, head in torch.cartesian_prod(*map(torch.arange, positions.shape[:2])).tolist():
        entries = positions[row, head].tolist()
        stored = [slot for slot, position in enumerate(entries) if position >= 0]
        recent = forced.recent
        if isinstance(recent, Share):
            fixed = max(protected_count(forced, entries) for entries in positions[row].tolist())
            share = math.floor(int(counts[row]) * recent.of_kept + 1e-9)
            recent = max(0, min(share, int(counts[row]) - fixed))
        newest = stored[len(stored) - min(recent, len(stored)) :]
        for slot in stored:
            mask[row, head, slot] = is_fixed(forced, entries[slot]) or slot in newest
    return mask


def is_fixed(forced, token):
    return token < forced.sinks or any(start <= token < stop for start, stop in forced.spans)


def protected_count(forced, entries):
    return sum(token >= 0 and is_fixed(forced, token) for token in entries)


@st.composite
def stored_rows(draw):
    """Token numbers of up to three rows after some eviction: holes, then ascending."""
    seen, heads, batch = draw(st.integers(1, 12)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    width = draw(st.integers(1, seen))
    positions = []
    for _ in range(batch):
        columns = st.sets(st.integers(0, seen - 1), min_size=1, max_size=width)
        rows = [sorted(draw(columns)) for _ in range(heads)]
        positions.append([[-1] * (width - len(row)) + row for row in rows])
    counts = draw(st.lists(st.integers(1, width), min_size=batch, max_size=batch))
    return torch.tensor(positions), torch.tensor(counts)


@given(
    stored_rows(),
    st.integers(0, 4),
    st.one_of(st.integers(0, 5), st.sampled_from([0.0, 0.25, 0.5, 1.0]).map(Share)),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=2).map(tuple),
)
@settings(max_examples=50, deadline=None)
def test_the_forced_mask_is_the_naive_loop(rows, sinks, recent, spans):
    forced = Forced(sinks=sinks, recent=recent, spans=spans)
    assert torch.equal(forced.mask(*rows), naive_mask(forced, *rows))


def mask_of(forced, places, count=4):
    mask = forced.mask(torch.tensor([[places]]), torch.tensor([count]))
    return mask.int().tolist()[0][0]


def test_sinks_recent_and_spans_by_hand():
    assert mask_of(Forced(sinks=2), [0, 1, 2, 3, 4]) == [1, 1, 0, 0, 0]
    assert mask_of(Forced(recent=2), [0, 1, 2, 3, 4]) == [0, 0, 0, 1, 1]
    assert mask_of(Forced(spans=((1, 3),)), [0, 1, 2, 3, 4]) == [0, 1, 1, 0, 0]
    assert mask_of(Forced(recent=Share(0.5)), [0, 1, 2, 3, 4], count=4) == [0, 0, 0, 1, 1]
    assert mask_of(Forced(), [0, 1, 2]) == [0, 0, 0]


def test_tokens_are_counted_without_padding():
    assert mask_of(Forced(sinks=2), [-1, -1, 0, 1, 2]) == [0, 0, 1, 1, 0]
    assert mask_of(Forced(spans=((1, 2),)), [-1, -1, 0, 1, 2]) == [0, 0, 0, 1, 0]
    assert mask_of(Forced(recent=9), [-1, -1, 0, 1, 2]) == [0, 0, 1, 1, 1]


def test_a_share_leaves_room_for_what_else_is_forced():
    forced = Forced(spans=((0, 3),), recent=Share(0.5))
    assert mask_of(forced, list(range(8)), count=4) == [1, 1, 1, 0, 0, 0, 0, 1]


def test_recent_tokens_are_the_last_stored_ones_whatever_was_evicted():
    assert mask_of(Forced(recent=2), [0, 3, 7, 90, 100]) == [0, 0, 0, 1, 1]
    assert mask_of(Forced(sinks=2), [1, 3, 7]) == [1, 0, 0]


@pytest.mark.parametrize(
    ("forced", "least"),
    [
        (Forced(), 0),
        (Forced(sinks=4, recent=8), 12),
        (Forced(recent=Share(0.5)), 0),
        (Forced(sinks=4, recent=Share(0.9)), 4),
        (Forced(spans=((2, 5), (10, 12))), 5),
        (Forced(sinks=4, spans=((2, 6),)), 6),
        (Forced(spans=((0, 5), (3, 8))), 8),
        (Forced(sinks=1, recent=2, spans=((5, 5),)), 3),
        (Forced(spans=((3, 9), (4, 5), (8, 10))), 7),
        # Counted without a list of them.
        (Forced(sinks=10**12, spans=((5, 10**13),)), 10**13),
    ],
)
def test_the_least_budget_counts_overlaps_once(forced, least):
    assert forced.least == least


def test_forced_entries_win_and_padding_loses():
    scores = torch.tensor([[[9.0, 1.0, 8.0, 7.0]]])
    forced = torch.tensor([[[False, True, False, False]]])
    positions = torch.tensor([[[-1, 1, 2, 3]]])
    ranked = with_forced(scores, forced, positions)
    assert ranked.tolist() == [[[-math.inf, math.inf, 8.0, 7.0]]]
    assert top(ranked, torch.tensor([2])).tolist() == [[[1, 2]]]
