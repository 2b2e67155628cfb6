# SPDX-License-Identifier: Apache-2.0
"""Scissorhands: how often recent queries gave an entry less than the average, by loops."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold import KvfoldError
from kvfold.methods import scissorhands as module
from kvfold.methods.scissorhands import seldom_below_average
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import PADDED, WINDOW, Head, best, newest
from tests.helpers.observations import mean_of_groups, naive_rows, observe
from tests.helpers.rounds import assert_each_round, per_full_head

RECENT = 5


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


def fewest(head: Head) -> list[int]:
    """The newest entries, and those that fewest of the last queries gave less than average."""
    counts = [0.0] * len(head)
    last = head.positions[-1]
    for rows in head.rows:
        for place, row in enumerate(rows):
            at = last - len(rows) + 1 + place
            visible = [i for i, position in enumerate(head.positions) if position <= at]
            for i in visible:
                counts[i] += float(row[i] < 1 / len(visible)) / len(head.rows)
    others = [-count for count in counts[: len(head) - RECENT]]
    return best(others, SMALL - RECENT) + newest(head, RECENT)


@pytest.mark.parametrize("interval", [3, 10])
@pytest.mark.parametrize("lengths", [PADDED, (17,)], ids=["padded", "short"])
def test_rounds_by_hand(lengths, interval):
    spec = f"scissorhands:window={WINDOW},recent={RECENT} + every:interval={interval}"
    assert_each_round(spec, per_full_head(fewest), lengths, interval)


def test_defaults_are_the_paper_s():
    stages = kvfold.parse("scissorhands").stages()
    assert (stages.needs.window, stages.forced.recent, stages.every) == (400, 10, 128)


@pytest.mark.parametrize("options", ["window=0", "recent=-1"])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(KvfoldError):
        kvfold.parse(f"scissorhands:{options}")
