# SPDX-License-Identifier: Apache-2.0
"""The page on the papers' claims: results, intervals and verdicts follow from the records."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from scipy import stats

import kvfold
from docs.generate import claims, claims_evidence, compact_samples
from docs.results.claims import measure_layers
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.run_folder import samples_file, summarize
from kvfold.methods.registry import listed
from kvfold.report.load import load_results
from tests.helpers.eval_results import cell, lines, scored
from tests.helpers.evaluation import HELD

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench() -> ModuleType:
    return claims


def publish(folder: Path, samples: dict[EvalCell, Sequence[float]], **fields: object) -> None:
    """Records and compact samples of a step, as `claims.sh` publishes them."""
    made = [each for of, scores in samples.items() for each in lines(of, list(map(scored, scores)))]
    for name, value in fields.items():
        changed = [each.outcome.model_copy(update={name: value}) for each in made if each.outcome]
        made = [
            each.model_copy(update={"outcome": outcome})
            for each, outcome in zip(made, changed, strict=True)
        ]
    folder.mkdir(parents=True, exist_ok=True)
    samples_file(folder).add(made)
    text = "\n".join(each.model_dump_json() for each in summarize(made))
    (folder / "records.jsonl").write_text(text)
    compact_samples.main(folder, folder / "samples.csv.gz")


def better(bench: ModuleType, **rule: float):
    given = {"kind": "better", "folder": "step", "one": "snapkv@0.2", "other": "full"}
    return bench.Test.of(given | rule)


ONE = cell(method="snapkv", budget="0.2")


@pytest.mark.parametrize(
    ("scores", "rule", "verdict"),
    [
        ([1.0] * 40, {"above": 0}, "reproduced"),
        ([1.0] * 40, {"below": 0}, "not reproduced"),
        ([0.0] * 40, {"above": 0}, "undecided"),
        ([0.0] * 40, {"above": -20}, "reproduced"),
        ([0.0] * 40, {"within": 20}, "reproduced"),
        ([0.0] * 40, {"within": 1}, "undecided"),
        ([1.0] * 40, {"within": 20}, "not reproduced"),
        ([1.0] * 40, {"beyond": 0}, "reproduced"),
        ([1.0] * 40, {"within": 20, "around": 90}, "reproduced"),
        ([0.0] * 40, {"within": 20, "around": 90}, "not reproduced"),
    ],
)
def test_a_verdict_follows_from_the_interval_and_the_rule(bench, tmp_path, scores, rule, verdict):
    publish(tmp_path / "step", {ONE: scores, cell(): [0.0] * 40})
    measured, found = better(bench, **rule).outcome(tmp_path)
    assert (measured.value, measured.n, found) == (100 * scores[0], 40, verdict)
    assert measured.low <= measured.value <= measured.high and measured.low < measured.high


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-3.75, "−3.8"),
        (-3.7499999999999996, "−3.8"),  # the same, summed in another order
        (1.25, "1.3"),
        (1.2500000000000002, "1.3"),
        (38.75, "38.8"),
        (53.75, "53.8"),
        (-0.04, "0.0"),
        (-0.0, "0.0"),
        (0.949, "0.9"),
    ],
)
def test_numbers_are_rounded_once_and_halves_away_from_zero(bench, value, text):
    assert claims_evidence.rounded(value, 1) == text


@pytest.mark.whole
def test_no_number_of_the_page_has_two_texts(bench):
    """One difference has one text, whichever test states it."""
    rows = [line.strip("| ").split(" | ") for line in bench.page().splitlines()]
    tests = [cells[-4:] for cells in rows if cells[-1] in bench.VERDICTS and len(cells) > 3]
    said = {(test.partition(": ")[0], result) for test, result, *_ in tests}
    assert len({name for name, _ in said}) == len(said) > 50


def test_one_sample_of_eighty_that_differs_gives_what_the_page_says(bench, tmp_path):
    """A margin of 5 points is met only if none does."""
    tasks = "kv_retrieval", "shared_kv"
    for lost, text, verdict in (
        (1, "−1.3 (−6.8 to 3.4)", "undecided"),
        (0, "0.0 (−4.5 to 4.5)", "reproduced"),
    ):
        published = {cell(task=task): [1.0] * 40 for task in tasks}
        published |= {
            cell(task=task, method="snapkv", budget="0.2"): [1.0 - bad] + [1.0] * 39
            for task, bad in zip(tasks, (lost, 0), strict=True)
        }
        publish(tmp_path / str(lost) / "step", published)
        for rule in ({"within": 5}, {"above": -5}):
            measured, found = better(bench, **rule).outcome(tmp_path / str(lost))
            assert (str(measured), found) == (text, verdict)
    assert "differs gives −1.3 (−6.8 to 3.4)" in " ".join(bench.PAGE.read_text("utf-8").split())


def test_missing_records_give_no_number(bench, tmp_path):
    for test in (
        better(bench, above=0),
        bench.Test.of({"kind": "layers", "statistic": "lazy", "above": 0}),
        bench.Test.of(
            {"kind": "operations", "folder": "step", "one": "a", "other": "b", "below": 2}
        ),
    ):
        assert test.outcome(tmp_path) == (None, "not run yet")
    publish(tmp_path / "step", {cell(): [0.0] * 3})  # the other method has no samples
    assert better(bench, above=0).outcome(tmp_path) == (None, "not run yet")
    page = bench.page(tmp_path)
    rows = [line for line in page.splitlines() if line.endswith("| not run yet |")]
    assert len(rows) == sum(len(claim.tests) for claim in bench.load()[1])
    assert all(line.endswith("|  |  | not run yet |") for line in rows)


def test_a_claim_of_several_tests(bench, tmp_path):
    publish(tmp_path / "step", {ONE: [1.0] * 40, cell(): [0.0] * 40})
    given = {"system": "D2O", "says": "Better", "source": "table 1"}

    def verdict(*tests) -> str:
        return bench.Claim(**given, tests=tests).verdict(tmp_path)

    holds, fails = better(bench, above=0), better(bench, below=0)
    missing = bench.Test.of({"kind": "layers", "statistic": "lazy", "above": 0})
    assert verdict(holds, holds) == "reproduced"
    assert verdict(holds, fails) == "in part"
    assert verdict(fails, fails) == "not reproduced"
    assert verdict(holds, missing) == "not run yet"
    assert bench.Claim(**given, unreachable="a GPU").verdict(tmp_path) == "out of reach here"
    best = bench.Claim(**given, best=True, tests=(holds, fails))
    assert best.verdict(tmp_path) == "not reproduced"
    undecided = better(bench, above=99.9)
    assert verdict(fails, undecided) == "not reproduced"
    assert bench.Claim(**given, best=True, tests=(holds, undecided)).verdict(tmp_path) == "in part"


def test_what_is_newer_than_its_run_is_marked(bench):
    assert str(better(bench, above=0)) == "`snapkv@0.2` − `full`, points: above 0"
    assert str(better(bench, within=5, after=True)).endswith("points: within ± 5 †")
    assert str(better(bench, within=0.2, around=2)).endswith("within 2 ± 0.2")


def test_a_remark_says_why_only_where_a_claim_failed(bench, tmp_path):
    publish(tmp_path / "step", {ONE: [1.0] * 40, cell(): [0.0] * 40})
    given = {"system": "D2O", "says": "Better", "source": "table 1", "why": "a", "note": "b"}
    for rule, remark in (({"above": 0}, "b"), ({"below": 0}, "a; b")):
        claim = bench.Claim(**given, tests=(better(bench, **rule),))
        assert claim.remark(tmp_path) == remark


def publish_kept(folder: Path, parts: dict[EvalCell, Sequence[float]]) -> None:
    """Compact samples of a step whose samples kept these parts."""
    made = []
    for of, kept in parts.items():
        for sample, part in zip(lines(of, [scored(1.0)] * len(kept)), kept, strict=True):
            held = {"held": HELD.model_copy(update={"kept": part})}
            outcome = sample.outcome.model_copy(update=held)
            made.append(sample.model_copy(update={"outcome": outcome}))
    folder.mkdir()
    samples_file(folder).add(made)
    compact_samples.main(folder, folder / "samples.csv.gz")


def test_kept_parts_of_the_same_samples_are_compared_in_pairs(bench, tmp_path):
    given = {"kind": "kept", "folder": "step", "one": "snapkv", "other": "h2o", "below": 0}
    test = bench.Test.of(given)
    assert test.outcome(tmp_path) == (None, "not run yet")
    of = {"snapkv": [0.2, 0.5, 0.8], "h2o": [0.3, 0.7, 0.9]}
    parts = {cell(method=method, budget="0.2"): kept for method, kept in of.items()}
    publish_kept(tmp_path / "step", parts)
    measured, verdict = test.outcome(tmp_path)
    # By hand: gaps −.1, −.2 and −.1, Student with two degrees.
    far = stats.t.ppf(0.975, 2) * math.sqrt(0.01 / 3 / 3)
    assert (measured.value, measured.n) == (pytest.approx(-0.4 / 3), 3)
    assert (measured.low, measured.high) == (
        pytest.approx(-0.4 / 3 - far),
        pytest.approx(-0.4 / 3 + far),
    )
    assert verdict == "undecided"


def test_kept_parts_of_two_tasks_are_compared_by_welch(bench, tmp_path):
    tasks = "kv_retrieval", "shared_kv"
    one, other = (cell(task=task, method="snapkv", budget="0.2") for task in tasks)
    publish_kept(tmp_path / "a", {one: [0.2, 0.3, 0.4]})
    publish_kept(tmp_path / "b", {other: [0.5, 0.9]})
    given = {"kind": "kept_by_task", "folder": "a", "other_folder": "b", "method": "snapkv"}
    test = bench.Test.of(given | dict(zip(("task", "other_task"), tasks, strict=True), below=0))
    measured, _ = test.outcome(tmp_path)
    assert test.steps == ["a", "b"]
    # By hand: variances of the means .01/3 and .08/2, Welch and Satterthwaite's degrees.
    first, second = 0.01 / 3, 0.08 / 2
    degrees = (first + second) ** 2 / (first**2 / 2 + second**2 / 1)
    far = stats.t.ppf(0.975, degrees) * math.sqrt(first + second)
    assert (measured.value, measured.n) == (pytest.approx(-0.4), 5)
    assert (measured.low, measured.high) == (pytest.approx(-0.4 - far), pytest.approx(-0.4 + far))


def test_operations_are_compared_task_by_task(bench, tmp_path):
    one, other = cell(method="kvzip", budget="0.3"), cell(method="snapkv", budget="0.3")
    publish(tmp_path / "a", {cell(): [1.0], one: [1.0] * 4}, prefill_operations=500.0)
    publish(tmp_path / "b", {other: [1.0] * 4}, prefill_operations=200.0)
    both = "\n".join((tmp_path / name / "records.jsonl").read_text() for name in "ab")
    (tmp_path / "a" / "records.jsonl").write_text(both)
    given = {"kind": "operations", "folder": "a", "one": "kvzip@0.3", "other": "snapkv@0.3"}
    measured, verdict = bench.Test.of(given | {"below": 2.6}).outcome(tmp_path)
    assert (str(measured), measured.n, verdict) == ("2.50", None, "reproduced")


def test_statistics_of_layers(bench, tmp_path):
    """Two texts of three layers: by hand."""
    layers = measure_layers
    attended, variance = ([9, 5, 2], [9, 2, 5]), ([1, 2, 8], [2, 4, 8])
    steady = ([1.0, 0.75, 0.5], [1.0, 0.75, 0.0])  # layer 0 is never lazy
    lazy, kept = ([0.1, 0.95, 0.99], [0.2, 0.91, 0.5]), ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    records = [
        layers.LayerRecord(
            book="book", passage=text, layer=layer, attended=attended[text][layer], holders=0.5,
            variance=variance[text][layer], lazy=lazy[text][layer], steady=steady[text][layer],
            kept=kept[text][layer],
        )
        for layer in (2, 0, 1)
        for text in (0, 1)
    ]  # fmt: skip
    layers.RecordFile(tmp_path / "layers" / layers.FILE, layers.LayerRecord)
    (tmp_path / "layers").mkdir()
    layers.RecordFile(tmp_path / "layers" / layers.FILE, layers.LayerRecord).add(records)

    def value(statistic: str) -> float:
        test = bench.Test.of({"kind": "layers", "statistic": statistic, "above": 0})
        measured, _ = test.outcome(tmp_path)
        return round(measured.value, 6)

    assert value("narrows") == -0.75  # −1 and −0.5
    assert value("grows") == 1
    assert value("variances") == 6  # 8 and 4
    assert value("lazy") == 0.5  # 2 and 1 of 3
    assert value("steady") == 0.5  # layers 1 and 2: 0.625 and 0.375
    assert value("steady_where_lazy") == 0.6875  # 0.625, and 0.75 of layer 1 alone
    assert value("same") == 0.5  # ranks 1 2 3 and 1 3 2, twice
    assert layers.picture(records).axes


def test_a_layer_is_steady_while_its_queries_agree_with_the_last(bench):
    import torch

    from kvfold.inspect.attention_maps import THRESHOLDS, LayerAttention

    edges = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.95, 0.2, 0.99, 0.91])
    kept = torch.arange(len(THRESHOLDS)).flip(0)
    attention = LayerAttention(
        3, torch.zeros(1, 1), torch.zeros(2), torch.tensor([2, 4]), torch.tensor([1.0, 3.0]),
        edges, 0.91, kept,
    )  # fmt: skip
    found = measure_layers.record("book", 0, attention)
    assert (found.steady, found.attended, found.holders, found.variance) == (0.75, 1, 3 / 8, 2)
    assert found.kept == kept[THRESHOLDS.index(pytest.approx(0.01))] / 8


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "layers", "statistic": "lazy"},
        {"kind": "layers", "statistic": "lazy", "above": 0, "below": 1},
    ],
)
def test_a_test_has_one_rule(bench, given):
    with pytest.raises(ValueError, match="one of above"):
        bench.Test.of(given)


@pytest.mark.whole
def test_the_published_page_is_that_of_the_records(bench):
    assert bench.PAGE.read_text(encoding="utf-8") == bench.page()


def test_the_script_runs_what_the_claims_compare(bench, tmp_path):
    """With a `kvfold` that only notes its arguments."""
    stub = tmp_path / "kvfold"
    stub.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" --- >> "$NOTES"\n')
    stub.chmod(0o755)
    out, notes = tmp_path / "out", tmp_path / "notes"
    out.mkdir()
    steps = [step for step in bench.steps(bench.load()[1]) if step != bench.LAYERS_STEP]
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NOTES": str(notes)}
    script, given = (
        ROOT / "docs" / "results" / "claims" / "run.sh",
        ["book.txt", "books", str(out), "model"],
    )
    subprocess.run(
        [script, *given], env=env | {"SAMPLES": "1", "STEPS": " ".join(steps)}, check=True
    )
    runs = {}
    for text in notes.read_text().split("---\n")[:-1]:
        words = text.splitlines()
        options = dict(pairwise(words))
        runs[Path(options["--out"]).name] = options | {"aware": "--question-aware" in words}
    assert list(runs) == steps
    for test in (each for claim in bench.load()[1] for each in claim.tests):
        of = test.evidence
        if test.steps == [bench.LAYERS_STEP]:
            continue
        for step in test.steps:
            check_run(runs[step], of)
        for step, task in (("folder", "task"), ("other_folder", "other_task")):
            if getattr(of, task, None):
                assert getattr(of, task) in runs[getattr(of, step)]["--tasks"].split(",")


def check_run(run: dict, of) -> None:
    """The run evaluates the methods of a test, at its budgets and under its protocol."""
    evaluated = {str(kvfold.parse(each)) for each in listed(run["--methods"])}
    named = [getattr(of, name) for name in ("one", "other", "method") if hasattr(of, name)]
    for name, _, budget in (each.partition("@") for each in named):
        assert name in {*evaluated, "full"}
        assert budget in {*run["--budgets"].split(","), ""}
        assert bool(budget) == (kvfold.parse(name).takes_budget)
    assert run["aware"] == getattr(of, "aware", False)


def test_the_curve_over_the_threshold_is_that_of_the_records(bench: ModuleType) -> None:
    """Means of the two needles; other options of the method are not in it."""
    points = {point.threshold: point[1:] for point in bench.curve(bench.RECORDS, "dbudgetkv")}
    assert list(points) == [0.001, 0.01, 0.05, 0.1, 0.3]
    records = load_results([bench.RECORDS / "dbudgetkv" / "records.jsonl"])
    own = [one for one in records if one.cell.method == "dbudgetkv:threshold=0.1"]
    assert len(own) == 2
    assert points[0.1] == pytest.approx(
        (sum(one.score.value for one in own) / 2, 50 * sum(one.kept for one in own))
    )
    assert len(bench.curve(bench.RECORDS, "simlayerkv")) == 8


def test_budgets_are_the_shares_of_the_prompts_that_the_page_says(bench: ModuleType) -> None:
    records = load_results([bench.RECORDS / "pyramidkv" / "records.jsonl"])
    note = bench.load()[0]["PyramidKV"].note
    assert "prompts here have about 920" in note
    for budget, percent in (("128", 14), ("256", 28), ("512", 56)):
        own = [r for r in records if (r.cell.method, r.cell.budget) == ("pyramidkv", budget)]
        kept = sum(each.kept for each in own) / len(own)
        assert round(100 * kept) == percent and f"{percent} %" in note
        assert int(budget) / kept == pytest.approx(920, abs=5)
