# SPDX-License-Identifier: Apache-2.0
"""Published cells that are run again: any difference is named."""

from __future__ import annotations

from docs.results import reproduce as script

TASK = "ruler_niah_single_2"


def test_the_cells_it_runs_are_published():
    found = script.of_cells(script.compact_samples.read(script.PUBLISHED), TASK, script.CELLS)
    assert len(found) == script.SAMPLES * len(script.CELLS) == 120
    assert all(set(script.COMPARED) <= set(row) for row in found.values())


def test_equal_rows_do_not_differ_and_others_are_named():
    published = script.of_cells(script.compact_samples.read(script.PUBLISHED), TASK, ["kvzip@0.2"])
    again = {key: dict(row) for key, row in published.items()}
    assert script.differing(published, again) == []

    first, second, *_ = sorted(again)
    again[first]["prediction"] = "another answer"
    del again[second]
    one, other = script.differing(published, again)
    assert str(first) in one and "'another answer'" in one
    assert str(second) in other and other.endswith("only published")
