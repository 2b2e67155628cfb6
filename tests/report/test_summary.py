# SPDX-License-Identifier: Apache-2.0
"""`kvfold report`: means, intervals and frontiers by hand; names stay text; nothing is mixed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kvfold.eval.run.cell_result import CellResult
from kvfold.evidence.estimates import IntervalEstimate, PairedDifference, percent
from kvfold.evidence.intervals import moments
from kvfold.report import summary, tables
from kvfold.report.board import boards, titles
from kvfold.report.page import payload
from kvfold.report.style import styles
from tests.helpers.reports import HERE, MODEL, board, made, row, three


def test_a_mean_is_over_tasks_and_within_a_task_over_lengths() -> None:
    found = summary.mean(three())
    assert found is not None
    assert found.value == pytest.approx((70 + 50) / 2)
    assert found.error == pytest.approx(math.sqrt(0.5**2 + 1.0**2 + 1.5**2))


def test_an_error_is_unknown_where_one_is() -> None:
    found = summary.mean([made(score=(80.0, 2.0)), made(score=(60.0, None), task="b")])
    assert found is not None and (found.value, found.error, found.low) == (70.0, None, None)
    assert summary.mean([made(score=None)]) is None


def test_intervals_of_tasks_combine_each_side_for_itself() -> None:
    one = made("m", "0.2", apart=(-2.0, -5.0, 1.0))
    other = made("m", "0.2", apart=(-4.0, -8.0, -1.0), task="b")
    alone, both = summary.gap([one]), summary.gap([one, other])
    assert alone == IntervalEstimate(-2.0, -5.0, 1.0) and alone.is_noise
    assert both is not None and not both.is_noise
    assert both.value == pytest.approx(-3.0)
    assert both.low == pytest.approx(-3 - math.hypot(1.5, 2.0))
    assert both.high == pytest.approx(-3 + math.hypot(1.5, 1.5))


def test_no_interval_where_one_is_missing_or_of_one_sample() -> None:
    known = made("m", "0.2", apart=(-2.0, -5.0, 1.0))
    single = PairedDifference(value=0, low=0, high=0, samples=1, worse=0, better=0)
    assert summary.gap([known, made("m", "0.2", task="b")]) is None
    assert summary.gap([known, made("m", "0.2", task="b", difference=single)]) is None


def test_tasks_without_any_difference_are_pooled() -> None:
    """Eight tasks of 20 samples, all as the full cache: known as well as 160 samples are."""
    none = percent(moments(np.zeros(20), np.ones(20)))
    same = PairedDifference(value=0, low=-16.8, high=16.8, samples=20, gained=none, lost=none,
                      correlation=0)  # fmt: skip
    found = summary.gap([made("m", "0.2", task=f"t{n}", difference=same) for n in range(8)])
    # Clopper and Pearson: none of 160.
    most = 100 * (1 - 0.025 ** (1 / 160))
    assert found is not None and found.is_noise
    assert (found.value, found.low, found.high) == (0, pytest.approx(-most), pytest.approx(most))
    alone = summary.gap([made("m", "0.2", difference=same)])
    assert alone is not None and alone.high == pytest.approx(100 * (1 - 0.025 ** (1 / 20)))


def test_places_are_what_intervals_leave_open() -> None:
    scores = {"m1": (80.0, 1.0), "m2": (78.0, 1.0), "m3": (76.0, 1.0), "m4": (10.0, 1.0)}
    results = [made(name, "0.2", score) for name, score in scores.items()]
    results += [made(), made("other", "0.1", (99.0, 1.0))]
    # Two means with an error of 1 are told apart beyond 2.77 points.
    assert {name: row(results, name, "0.2").place for name in scores} == {
        "m1": (1, 2), "m2": (1, 3), "m3": (2, 3), "m4": (4, 4),
    }  # fmt: skip
    assert row(results, "other", "0.1").place == (1, 1)
    assert row(results, "full").place is None


def test_perplexity_is_better_when_lower() -> None:
    scores = {"low": (10.0, 0.1), "high": (12.0, 0.1)}
    results = [made(n, "0.2", score, lower_is_better=True) for n, score in scores.items()]
    assert row(results, "low", "0.2").place == (1, 1)
    assert row(results, "high", "0.2").place == (2, 2)


def test_a_row_without_every_task_has_no_place_and_is_on_no_frontier() -> None:
    results = [*board(), made("partial", "0.2", (100.0, 0.1), (10.0, 9.0, 11.0), nbytes=1.0)]
    partial = row(results, "partial", "0.2")
    assert (partial.units, partial.expected, partial.place) == (1, 2, None)
    shown = payload(boards(results), styles(summary.rows(results)))
    view = shown["boards"][0]["views"][0]
    edge = {
        shown["methods"][values[0]]["name"]
        for values in view["rows"]
        if dict(zip(shown["fields"], values, strict=True))["edge"]
    }
    assert edge == {"full", "good"}


def test_the_frontier_is_what_nothing_beats_in_both() -> None:
    points = [(1.0, 90.0), (0.2, 70.0), (0.1, 75.0), (0.1, 60.0), (0.5, 75.0), (0.05, 10.0)]
    assert summary.frontier(points) == [5, 2, 0]
    assert summary.frontier(points, lower=True) == [5]
    assert summary.frontier([]) == []


def test_times_and_bytes_are_over_the_full_caches() -> None:
    full = [made(prefill_seconds=2.0), made(task="b", prefill_seconds=4.0)]
    own = [
        made("m", "0.2", prefill_seconds=3.0),
        made("m", "0.2", task="b", prefill_seconds=6.0, nbytes=300.0),
    ]
    found = row([*full, *own], "m", "0.2")
    assert found.prefill == pytest.approx(1.5)
    assert found.bytes_ratio == pytest.approx((0.2 + 0.3) / 2)
    elsewhere = HERE.model_copy(update={"cpu": "b"})
    moved = [own[0], own[1].model_copy(update={"setups": (elsewhere,)})]
    assert row([*full, *moved], "m", "0.2").prefill is None


def test_operations_and_lengths_are_over_the_full_caches_where_all_are_known() -> None:
    def counted(*arguments: str, prefill: float, step: float, tokens: float, task: str = "a"):
        figures = {"prefill_operations": prefill, "step_operations": step, "answer_tokens": tokens}
        return made(*arguments, task=task, **figures)

    full = [
        counted(prefill=10.0, step=4.0, tokens=6.0),
        counted(prefill=30.0, step=4.0, tokens=2.0, task="b"),
    ]
    own = [
        counted("m", "0.2", prefill=20.0, step=1.0, tokens=8.0),
        counted("m", "0.2", prefill=40.0, step=3.0, tokens=4.0, task="b"),
    ]
    found = row([*full, *own], "m", "0.2")
    assert found.prefill_operations == pytest.approx(60 / 40)
    assert found.step_operations == pytest.approx(4 / 8)
    assert found.length == pytest.approx(12 / 8)
    older = [own[0], own[1].model_copy(update={"step_operations": None})]
    found = row([*full, *older], "m", "0.2")
    assert found.step_operations is None and found.length == pytest.approx(12 / 8)
    assert "1.50× / – | 1.50×" in " | ".join(tables.cells(found))


def test_protocols_models_and_perplexities_are_never_mixed() -> None:
    other = MODEL.model_copy(update={"weights": "others"})
    results = [
        made(score=(90.0, 1.0)),
        made(score=(10.0, 1.0), aware=True),
        made(score=(50.0, 1.0), subject=other),
        made(score=(7.0, 1.0), task="perplexity", lower_is_better=True, group="language"),
    ]
    every = boards(results)
    means = [r.score.value for one in every for r in one.overall() if r.score]
    assert means == [90.0, 50.0, 10.0]
    assert [len(one.perplexities) for one in every] == [1, 0, 0]
    assert titles(every) == [
        "tiny (1), question-agnostic", "tiny (2), question-agnostic", "tiny (1), question-aware",
    ]  # fmt: skip


def test_runs_of_the_same_cells_with_other_settings_are_never_mixed() -> None:
    def run(score: float, seed: int = 0, tokens: int | None = None, **about: Any) -> CellResult:
        result = made(score=(score, 1.0), **about)
        protocol = result.cell.protocol.model_copy(update={"answer_tokens": tokens})
        cell = result.cell.model_copy(update={"seed": seed, "protocol": protocol})
        return result.model_copy(update={"cell": cell})

    apart = [run(90.0), run(50.0, seed=1), run(20.0, tokens=16)]
    every = boards(apart)
    assert [[row.score.value for row in one.overall() if row.score] for one in every] == [
        [90.0], [50.0], [20.0],
    ]  # fmt: skip
    assert [one.settings for one in every] == [
        "seed 0, the tasks' own answer lengths", "seed 1, the tasks' own answer lengths",
        "seed 0, answers of 16 tokens",
    ]  # fmt: skip
    assert titles(every)[1] == "question-agnostic, seed 1, the tasks' own answer lengths"
    # Tasks of one run may differ in them.
    (one,) = boards([run(90.0), run(50.0, tokens=48, task="longer")])
    assert one.settings == "" and [row.units for row in one.overall()] == [2]


def test_views_are_by_group_task_and_length() -> None:
    results = [*three(), made(score=(20.0, 1.0), task="c", group="code", length=None)]
    views = boards(results)[0].views()
    values = {(v.kind, v.name, v.length): v.rows[0].score for v in views}
    assert {key: score and score.value for key, score in values.items()} == {
        ("overall", "all tasks", None): pytest.approx((70 + 50 + 20) / 3),
        ("overall", "all tasks", 1024): 65.0, ("overall", "all tasks", 2048): 60.0,
        ("group", "needles", None): 60.0, ("group", "needles", 1024): 65.0,
        ("group", "needles", 2048): 60.0, ("group", "code", None): 20.0,
        ("task", "a", None): 70.0, ("task", "a", 1024): 80.0, ("task", "a", 2048): 60.0,
        ("task", "b", None): 50.0, ("task", "b", 1024): 50.0, ("task", "c", None): 20.0,
    }  # fmt: skip
