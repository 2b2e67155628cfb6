# SPDX-License-Identifier: Apache-2.0
"""The headline: the smallest cache that loses little for certain."""

from __future__ import annotations

from kvfold.eval.run.cell_result import CellResult
from kvfold.report import summary
from kvfold.report.headline import headline
from tests.helpers.reports import made

WHEN = "before the question is known"


def test_the_headline_is_the_smallest_cache_that_loses_little_for_certain() -> None:
    def said(*more: CellResult) -> str:
        return headline(summary.rows([made(), *more]), WHEN).claim

    near = made("near", "0.5", (89.5, 1.0), (-0.5, -1.5, 0.5))
    small = made("small", "0.1", (87.0, 1.0), (-3.0, -4.5, -1.5))
    lost = made("lost", "0.1", (20.0, 1.0), (-70.0, -75.0, -65.0))
    assert said(near, small).startswith("near at 0.5 holds 50 % of the full cache’s bytes")
    assert "at most 2 points" in said(near, small)
    assert headline(summary.rows([made(), near, small]), WHEN).further == (
        "For at most 5 points, small at 0.1 holds 10 %.",
    )
    few = made("few", "0.1", (90.0, 9.0), (0.0, -17.0, 17.0))
    assert said(few, lost) == "Too few samples to tell what is lost."
    assert said(lost).startswith("No method is certain to stay within 10 points")
    assert said(made("random", "0.1", (90.0, 1.0), (0.0, -1.0, 1.0))) == "No method to compare."
    assert headline(summary.rows([near]), WHEN).claim == "Nothing to compare with."


def test_the_headline_speaks_of_a_fifth_of_the_cache_where_it_was_measured() -> None:
    best = made("best", "0.2", (81.0, 1.0), (-9.0, -11.0, -7.0))
    near = made("near", "0.2", (80.5, 1.0), (-9.5, -11.5, -7.5))
    worse = made("worse", "0.2", (45.0, 1.0), (-45.0, -47.0, -43.0))
    large = made("large", "0.5", (89.9, 1.0), (-0.1, -1.0, 0.8))

    said = headline(summary.rows([made(), worse, best, near, large]), WHEN)

    assert said.claim == (
        "At a fifth of the cache, best keeps 90 % of the full score before the question is known."
    )
    assert "difference of −9.0 points, 95 % interval −11.0 to −7.0" in said.evidence
    assert said.further == (
        "Not told apart from best: near.",
        "Of 4 caches, the smallest that loses at most 2 points, each with 95 % confidence, is "
        "large at 0.5: 50 % of the bytes.",
    )


def test_a_whole_score_is_not_given_in_percent() -> None:
    whole = made("best", "0.2", (90.1, 1.0), (0.1, -1.0, 1.2))

    claim = headline(summary.rows([made(), whole]), "with the question in view").claim

    assert claim.startswith("At a fifth of the cache, best keeps the full score with the question")


def test_a_row_that_lacks_samples_is_measured_on_those_that_it_has() -> None:
    """The full cache scores 90; on the samples of `some`, which are easier, 100."""
    some = made("some", "0.2", (91.0, 1.0), (-9.0, -11.0, -7.0))
    whole = made("whole", "0.2", (87.3, 1.0), (-2.7, -4.0, -1.4))

    said = headline(summary.rows([made(), some, whole]), WHEN)

    assert said.claim.startswith("At a fifth of the cache, whole keeps 97 % of the full score")
    assert headline(summary.rows([made(), some]), WHEN).evidence.startswith(
        "It scores 91.0 where the full cache scores 100.0: a difference of −9.0 points"
    )
