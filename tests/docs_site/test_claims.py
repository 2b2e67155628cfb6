# SPDX-License-Identifier: Apache-2.0
"""The page on the papers' claims: results, intervals and verdicts follow from the records."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from scipy import stats

import kvfold
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.run_folder import samples_file, summarize
from kvfold.methods.registry import listed
from kvfold.report.load import load_results
from tests.helpers.eval_results import cell, lines, scored
from tests.helpers.evaluation import HELD
from tests.helpers.scripts import BENCHMARKS, scripts_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """`benchmarks/claims.py`."""
    with scripts_of(BENCHMARKS) as script:
        yield script("claims")


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
    import_module("compact_samples").main(folder, folder / "samples.csv.gz")


def better(bench: ModuleType, **rule: float):
    given = {"kind": "better", "folder": "step", "one": "snapkv@0.2", "other": "full"}
    return bench.Test.of(given | rule)


ONE = cell(method="snapkv", budget="0.2")


@pytest.mark.parametrize(
    ("scores", "rule", "verdict"),
    [
        ([1.0] * 40, {"above": 0}, "reproduced"),
        ([1.0] * 40, {"below": 0}, "not reproduced"),
        ([0.0] * 40, {"above": 0}, "not told apart"),
        ([0.0] * 40, {"above": -20}, "reproduced"),
        ([0.0] * 40, {"within": 20}, "reproduced"),
        ([0.0] * 40, {"within": 1}, "not told apart"),
        ([1.0] * 40, {"within": 20}, "not reproduced"),
        ([1.0] * 40, {"beyond": 0}, "reproduced"),
    ],
)
def test_a_verdict_follows_from_the_interval_and_the_rule(bench, tmp_path, scores, rule, verdict):
    publish(tmp_path / "step", {ONE: scores, cell(): [0.0] * 40})
    measured, found = better(bench, **rule).outcome(tmp_path)
    assert (measured.value, measured.n, found) == (100 * scores[0], 40, verdict)
    assert measured.low <= measured.value <= measured.high and measured.low < measured.high


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


def test_kept_parts_are_compared_by_welch(bench, tmp_path):
    parts = {"snapkv": [0.2, 0.3, 0.4], "h2o": [0.5, 0.9]}
    folder = tmp_path / "step"
    folder.mkdir()
    made = [
        sample.model_copy(
            update={
                "outcome": sample.outcome.model_copy(
                    update={"held": HELD.model_copy(update={"kept": kept})}
                )
            }
        )
        for method, each in parts.items()
        for sample, kept in zip(
            lines(cell(method=method, budget="0.2"), [scored(1.0)] * len(each)), each, strict=True
        )
    ]
    samples_file(folder).add(made)
    import_module("compact_samples").main(folder, folder / "samples.csv.gz")
    task = {"task": "kv_retrieval", "other_task": "kv_retrieval"}
    given = {"kind": "kept", "folder": "step", "one": "snapkv", "other": "h2o", **task, "below": 0}
    measured, _ = bench.Test.of(given).outcome(tmp_path)
    # By hand: variances of the means .01/3 and .08/2, Welch and Satterthwaite's degrees.
    one, other = 0.01 / 3, 0.08 / 2
    degrees = (one + other) ** 2 / (one**2 / 2 + other**2 / 1)
    far = stats.t.ppf(0.975, degrees) * math.sqrt(one + other)
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
    assert (str(measured), measured.n, verdict) == ("2.50", 4, "reproduced")


def test_statistics_of_layers(bench, tmp_path):
    """Two texts of three layers: by hand."""
    layers = import_module("layers")
    attended, variance = ([9, 5, 2], [9, 2, 5]), ([1, 2, 8], [2, 4, 8])
    lazy, kept = ([0.1, 0.95, 0.99], [0.2, 0.91, 0.5]), ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    records = [
        layers.LayerRecord(
            book="book", passage=text, layer=layer, attended=attended[text][layer], holders=0.5,
            variance=variance[text][layer], lazy=lazy[text][layer], steady=0.75,
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
    assert value("steady") == 0.75
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
    found = import_module("layers").record("book", 0, attention)
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


def test_the_published_page_is_that_of_the_records(bench):
    assert bench.PAGE.read_text(encoding="utf-8") == bench.page()


def test_the_script_runs_what_the_claims_compare(bench, tmp_path):
    """With a `kvfold` that only notes its arguments."""
    stub = tmp_path / "kvfold"
    stub.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" --- >> "$NOTES"\n')
    stub.chmod(0o755)
    out, notes = tmp_path / "out", tmp_path / "notes"
    out.mkdir()
    steps = [step for step in bench.steps(bench.load()[1]) if step != "layers"]
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NOTES": str(notes)}
    script, given = ROOT / "benchmarks" / "claims.sh", ["book.txt", "books", str(out), "model"]
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
        if test.step == "layers":
            continue
        run, of = runs[test.step], test.evidence
        evaluated = {str(kvfold.parse(each)) for each in listed(run["--methods"])}
        for name, _, budget in (each.partition("@") for each in (of.one, of.other)):
            assert name in {*evaluated, "full"}
            assert budget in {*run["--budgets"].split(","), ""}
            assert bool(budget) == (kvfold.parse(name).takes_budget)
        assert run["aware"] == getattr(of, "aware", False)
        tasks = {getattr(of, "task", None), getattr(of, "other_task", None)} - {None}
        assert tasks <= set(run["--tasks"].split(","))


def test_the_curve_over_the_threshold_is_that_of_the_records(bench: ModuleType) -> None:
    """Means of the two needles; other options of the method are not in it."""
    curves = bench.claims_curves
    points = {point.threshold: point[1:] for point in curves.curve(bench.RESULTS, "dbudgetkv")}
    assert list(points) == [0.001, 0.01, 0.05, 0.1, 0.3]
    records = load_results([bench.RESULTS / "dbudgetkv" / "records.jsonl"])
    own = [one for one in records if one.cell.method == "dbudgetkv:threshold=0.1"]
    assert len(own) == 2
    assert points[0.1] == pytest.approx(
        (sum(one.score.value for one in own) / 2, 50 * sum(one.kept for one in own))
    )
    assert len(curves.curve(bench.RESULTS, "simlayerkv")) == 8
