# SPDX-License-Identifier: Apache-2.0
"""Scores by the last queries' attention rows: counts by loops, and KVCache-Factory's numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvfold import Observation
from kvfold.methods.stages.score import recent_rows as module
from kvfold.methods.stages.score.recent_rows import lasting_attention, seldom_below_average
from kvfold.observers.stored import PreviousScores
from tests.helpers.observations import mean_of_groups, naive_rows, observe

ROWS = torch.tensor(
    [
        [0.4, 0.3, 0.2, 0.1, 0.0, 0.0],
        [0.1, 0.2, 0.1, 0.3, 0.3, 0.0],
        [0.05, 0.05, 0.5, 0.1, 0.1, 0.2],
    ]
)


def with_rows() -> Observation:
    """One head whose three queries, all after the sixth entry, give these rows."""
    unit = torch.eye(6)[None, None]
    places, at = torch.arange(6)[None, None], torch.full((1, 3), 5)
    logits = ROWS.clamp(min=1e-30).log()[None, None]
    old = torch.zeros(1, 1, 6)
    return Observation(unit, unit, places, logits, at, scale=1.0, observed={PreviousScores: old})


def test_sums_and_decay_of_the_released_code():
    recent = torch.tensor([0.15, 0.25, 0.6, 0.4, 0.4, 0.2])
    seen = with_rows()
    torch.testing.assert_close(lasting_attention(seen, 2, 0.5)[0, 0], recent)
    before = dataclasses.replace(seen, observed={PreviousScores: ROWS[:1][None]})
    expected = torch.tensor([0.35, 0.4, 0.7, 0.45, 0.4, 0.2])
    torch.testing.assert_close(lasting_attention(before, 2, 0.5)[0, 0], expected)


@pytest.mark.parametrize("block", [1, 3, 32])
def test_counts_by_loops(block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    seen = observe((20,))
    rows = naive_rows(seen)  # [Hq, W, T], whose last query is at the last key
    counts = torch.zeros(len(rows), 20, dtype=torch.float64)
    for head, of_head in enumerate(rows):
        for w, row in enumerate(of_head):
            visible = 20 - len(of_head) + w + 1
            counts[head, :visible] += row[:visible] < 1 / visible
    expected = -mean_of_groups(counts, 2)
    found = seldom_below_average(seen, 8)[0].double()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert len(found.unique()) > 4
