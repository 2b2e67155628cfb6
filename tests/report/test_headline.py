# SPDX-License-Identifier: Apache-2.0
"""The headline: the smallest cache that loses little for certain."""

from __future__ import annotations

from kvfold.eval.run.cell_result import CellResult
from kvfold.report import summary
from kvfold.report.headline import headline
from tests.helpers.reports import made


def test_the_headline_is_the_smallest_cache_that_loses_little_for_certain() -> None:
    def said(*more: CellResult) -> str:
        return headline(summary.rows([made(), *more])).claim

    near = made("near", "0.5", (89.5, 1.0), (-0.5, -1.5, 0.5))
    small = made("small", "0.1", (87.0, 1.0), (-3.0, -4.5, -1.5))
    lost = made("lost", "0.1", (20.0, 1.0), (-70.0, -75.0, -65.0))
    assert said(near, small).startswith("near at 0.5 holds 50 % of the full cache’s bytes")
    assert "at most 2 points" in said(near, small)
    assert headline(summary.rows([made(), near, small])).further == (
        "For at most 5 points, small at 0.1 holds 10 %.",
    )
    few = made("few", "0.1", (90.0, 9.0), (0.0, -17.0, 17.0))
    assert said(few, lost) == "Too few samples to tell what is lost."
    assert said(lost).startswith("No method is certain to stay within 10 points")
    assert said(made("random", "0.1", (90.0, 1.0), (0.0, -1.0, 1.0))) == "No method to compare."
    assert headline(summary.rows([near])).claim == "Nothing to compare with."
