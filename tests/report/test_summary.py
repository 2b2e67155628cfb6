# SPDX-License-Identifier: Apache-2.0
"""`kvfold report`: means, intervals and frontiers by hand; names stay text; nothing is mixed."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import itertools
import json
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvfold.bench.machine import MachineSetup
from kvfold.cli import app
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import EvalCell, EvalProtocol, EvaluatedModel
from kvfold.eval.run.cell_result import CellResult
from kvfold.eval.run.intervals import moments
from kvfold.eval.run.statistics import Estimate, PairedDifference, percent
from kvfold.report import caveats, summary
from kvfold.report.board import boards, slugs, titles
from kvfold.report.headline import headline, signed
from kvfold.report.load import load_results
from kvfold.report.page import embedded, page, payload
from kvfold.report.pictures import by_depth
from kvfold.report.style import COLORS, styles
from kvfold.report.tables import by_task, markdown, to_csv
from kvfold.report.write import write

HOSTILE = "</script><img src=x onerror=alert(1)>"
HERE = MachineSetup(cpu="a", cores=2, gpu=None, threads=2, python="3.12", versions={"torch": "2"})
MODEL = EvaluatedModel(
    name="tiny", config="c", weights="w", vocabulary="v", dtype="float32", attention="sdpa"
)
PLAIN: dict[str, Any] = {
    "benchmark": "ruler", "group": "needles", "haystack": None, "phase": "prefill",
    "metric": "match", "lower_is_better": False, "samples": 100, "questions": 100,
    "scores": {}, "by": {}, "kept_per_layer": (), "peak_bytes": None, "tokens": 1000.0,
    "prefill_seconds": 2.0,
    "seconds_per_token": None, "answer_tokens": None, "truncation": "none", "truncated": 0,
    "at_limit": 0, "failed": {}, "errors": {}, "commits": ("abc",), "setups": (HERE,),
    "nbytes_full": 1000.0,
}  # fmt: skip


def known(value: float, error: float | None) -> Estimate:
    """A mean of 100 samples and its standard error."""
    far = None if error is None else 1.96 * error
    return Estimate(
        value=value,
        error=error,
        low=None if far is None else value - far,
        high=None if far is None else value + far,
        count=100,
    )


def made(
    method: str = "full",
    budget: str | None = None,
    score: tuple[float, float | None] | None = (90.0, 1.0),
    apart: tuple[float, float, float] | None = None,
    task: str = "a",
    length: int | None = 1024,
    aware: bool = False,
    **changed: Any,
) -> CellResult:
    """A record; `score` is a value and its error, `apart` the difference to the full cache."""
    subject = changed.pop("subject", MODEL)
    kept = float(budget) if budget else 1.0
    protocol = EvalProtocol(question_aware=aware, max_length=2048)
    fields = PLAIN | {
        "cell": EvalCell(
            subject=subject, task=task, length=length, seed=0, data=(), protocol=protocol,
            method=method, budget=budget,
        ),
        "score": None if score is None else known(*score),
        "difference": None if apart is None else PairedDifference(
            value=apart[0], low=apart[1], high=apart[2], samples=100, worse=1, better=1),
        "kept_nominal": kept if budget else None, "kept": kept, "nbytes": 1000.0 * kept,
    }  # fmt: skip
    return CellResult(**(fields | changed))


def row(results: Sequence[CellResult], method: str, budget: str | None = None) -> summary.ReportRow:
    return next(r for r in summary.rows(results) if (r.method, r.budget) == (method, budget))


def three() -> list[CellResult]:
    """Task a at two lengths, task b at one."""
    return [
        made(score=(80.0, 2.0)),
        made(score=(60.0, 4.0), length=2048),
        made(score=(50.0, 3.0), task="b"),
    ]


def board() -> list[CellResult]:
    """Full cache, two methods and a baseline on two tasks."""
    results = []
    for task in ("a", "b"):
        results += [
            made(task=task, score=(90.0, 1.0)),
            made("good", "0.2", (89.0, 1.0), (-1.0, -1.5, -0.5), task),
            made("bad", "0.2", (70.0, 2.0), (-20.0, -24.0, -16.0), task),
            made("random", "0.2", (10.0, 1.0), (-80.0, -85.0, -75.0), task),
        ]
    return results


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
    assert alone == summary.ScoreGap(-2.0, -5.0, 1.0) and alone.is_noise
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


def test_every_caveat_is_said() -> None:
    elsewhere = HERE.model_copy(update={"cpu": "b"})
    results = [
        made(score=(3.0, 1.0)),
        made("random", "0.1", (3.0, 1.0), (0.0, -1.0, 1.0), samples=20),
        made("m", "0.1", kept=0.2, errors={"too long": 3}, failed={"no number": 2}, truncated=4),
        made("n", "0.1", task="b", setups=(elsewhere,), commits=("def-dirty",)),
        made(task="chat", metric=None, score=None),
        made("m", "0.1", task="maths", phase="decode", at_limit=60),
    ]
    found = {caveat.about: caveat.lines for caveat in caveats.board_caveats(boards(results)[0])}
    said = "\n".join(line for lines in found.values() for line in lines)
    for words in (
        "a at 1,024 tokens: 3.0 with a full cache, where guessing gives about 0",
        "a at 1,024 tokens: no difference that 20 samples show at 0.1",
        "20 samples; with half of them right, a mean is known to ±22 points",
        "n at 0.1: without a at 1,024 tokens, maths at 1,024 tokens",
        "streaming_llm (sinks + recent)",
        "m at 0.1: 0.200 of the entries",
        "4 of 100 samples",
        "maths at 1,024 tokens, m at 0.1: 60 of 100 answers",
        "3 × too long (a 1024, m 0.1)",
        "2 × no number",
        "cpu is b, there a",
        "recorded at abc, def-dirty",
        "def-dirty: with uncommitted changes",
        "chat at 1,024 tokens: not in the means",
    ):
        assert words in said, words


def test_kvzips_rows_of_the_bundled_model_have_a_caveat() -> None:
    bundled = MODEL.model_copy(update={"name": "bundled"})
    for subject, method, said in ((bundled, "kvzip", True), (MODEL, "kvzip", False),
                                  (bundled, "snapkv", False)):  # fmt: skip
        results = [made(method, "0.2", subject=subject)]
        assert ("own repeat prompt, in 15 %" in markdown(boards(results))) == said


def test_four_choices_are_guessed_right_a_quarter_of_the_time() -> None:
    assert caveats.near_guessing(made(score=(27.0, 1.0), metric="option"))
    assert not caveats.near_guessing(made(score=(27.0, 1.0), metric="match"))


def test_csv_holds_every_field() -> None:
    results = [
        made(by={"depth": {"0.0": known(1 / 3, None)}}, task='odd, "name"\nhere'),
        made("m", "0.2", None, length=None, errors={HOSTILE: 2}),
        made("m", "0.1", (1 / 3, None), (-1.0, -2.0, 0.5)),
    ]
    lines = list(csv.DictReader(io.StringIO(to_csv(results))))
    assert [_unflattened(line) for line in lines] == results


def _unflattened(line: dict[str, str]) -> CellResult:
    nested: dict[str, Any] = {}
    for name, text in line.items():
        *path, last = name.split(".")
        at = nested
        for part in path:
            at = at.setdefault(part, {})
        at[last] = json.loads(text) if text[:1] in ("{", "[") else text or None
    difference = nested["difference"]
    for inside, name in ((difference, "gained"), (difference, "lost"), (nested, "score"),
                         (nested, "difference")):  # fmt: skip
        if not any(value is not None for value in inside[name].values()):
            inside[name] = None
    return CellResult.model_validate(nested)


class Tags(HTMLParser):
    """Every tag with its attributes, and what scripts and styles hold, by id or name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = (dict(attrs).get("id") or tag) if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[self.inside] = self.texts.get(self.inside, "") + data


def hostile_page() -> str:
    subject = MODEL.model_copy(update={"name": HOSTILE})
    results = [
        made(task=HOSTILE, subject=subject, group=HOSTILE),
        made(HOSTILE, "0.2", (80.0, 1.0), (-10.0, -12.0, -8.0), HOSTILE, subject=subject,
             group=HOSTILE, errors={HOSTILE: 1}, by={"depth": {"0.0": known(1, 0)}}),
    ]  # fmt: skip
    return page(boards(results), styles(summary.rows(results)))


def test_names_stay_text() -> None:
    text = hostile_page()
    parsed = Tags(text)
    names = [tag for tag, _ in parsed.tags]
    assert names.count("script") == 2 and "img" not in names
    assert "<img" not in text
    data = json.loads(parsed.texts["data"])
    assert [method["name"] for method in data["methods"]] == ["full", HOSTILE]
    assert data["boards"][0]["groups"] == {HOSTILE: [HOSTILE]}


def test_scripts_never_write_html() -> None:
    parsed = Tags(hostile_page())
    forbidden = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function"
    assert not re.search(forbidden, parsed.texts["script"])


def test_the_page_asks_nothing_of_a_network() -> None:
    text = hostile_page()
    parsed = Tags(text)
    assert not re.search(r"https?:|url\(|@import|\bfetch\b|XMLHttpRequest", text)
    for _, attributes in parsed.tags:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    policy = next(a["content"] or "" for t, a in parsed.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(parsed.texts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_embedded_data_is_the_same_data() -> None:
    data = {"name": f"{HOSTILE}&\u2028\u2029é", "number": 0.1}
    text = embedded(data)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == data


def test_markdown_escapes_names() -> None:
    results = [made(task="a|b`<b>"), made(HOSTILE, "0.2", (80.0, 1.0), (-10.0, -12.0, -8.0))]
    text = markdown(boards(results))
    assert "<" not in text.replace("&lt;", "") and HOSTILE not in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {11}


def test_markdown_says_what_is_inside_the_noise() -> None:
    results = [made(), made("m", "0.2", (89.0, 1.0), (-1.0, -3.0, 1.0))]
    assert "| ≈ −1.0 (−3.0 to +1.0) |" in markdown(boards(results))
    assert (signed(-0.04), signed(2.0), signed(-2.0)) == ("0.0", "+2.0", "−2.0")


def test_every_table_names_the_haystack() -> None:
    results = [
        made(task="a", haystack="book.txt"),
        made(task="b", haystack="noise instead of essays", group="others"),
        made(task="c", haystack="book.txt"),
    ]
    text = markdown(boards(results))
    assert "### all tasks\n\nHaystack: book.txt (a, c); noise instead of essays (b).\n" in text
    assert "### others\n\nHaystack: noise instead of essays (b).\n" in text
    assert "### a\n\nHaystack: book.txt (a).\n" in by_task(boards(results))
    views = payload(boards(results), styles(summary.rows(results)))["boards"][0]["views"]
    assert {v["name"]: v["haystack"] for v in views if v["kind"] == "task"} == {
        "a": "book.txt (a)", "b": "noise instead of essays (b)", "c": "book.txt (c)",
    }  # fmt: skip
    assert "Haystack" not in markdown(boards([made()]))


def test_the_best_methods_have_colours_of_their_own() -> None:
    count = len(COLORS) + 3
    results = [made(f"m{n}", "0.2", (float(n), 1.0)) for n in range(count)]
    found = styles(summary.rows([made(), *results, made("random", "0.2")]))
    assert found["full"].color is None and found["random"].color is None
    assert len(set(found.values())) == count + 2
    own = [style for style in found.values() if style.color is not None]
    assert len({(style.shape, style.dash) for style in own if style.color == 0}) == 2
    assert all(one.shape != other.shape for one, other in itertools.pairwise(own))
    best = [f"m{n}" for n in range(count - 1, count - 1 - len(COLORS), -1)]
    assert [found[name].color for name in best] == list(range(len(COLORS)))


def test_methods_of_one_colour_differ_in_shape_and_dash() -> None:
    count = 3 * len(COLORS)
    results = [made(f"m{n}", "0.2", (float(n), 1.0)) for n in range(count)]
    found = styles(summary.rows(results))
    for color in range(len(COLORS)):
        same = [style for style in found.values() if style.color == color]
        assert len({style.shape for style in same}) == len({style.dash for style in same}) == 3


def test_a_larger_budget_that_scores_less_is_said_and_explained_where_it_can_be() -> None:
    results = [made(), *(made("kvzip", b, (s, 1.0)) for b, s in (("0.2", 92.9), ("0.5", 82.8)))]
    about = "A larger budget scores less, beyond the noise"
    for name, explained in (("bundled", True), ("other", False)):
        named = MODEL.model_copy(update={"name": name})
        cells = [r.cell.model_copy(update={"subject": named}) for r in results]
        of_name = [
            r.model_copy(update={"cell": cell}) for r, cell in zip(results, cells, strict=True)
        ]
        found = {d.about: d.lines for d in caveats.board_caveats(boards(of_name)[0])}
        assert found[about][0].startswith("kvzip: 92.9 at 0.2, and 82.8 at 0.5")
        assert ("distracts a model of four layers" in found[about][0]) == explained
    near = [made(), *(made("kvzip", b, (s, 3.0)) for b, s in (("0.2", 92.9), ("0.5", 90.8)))]
    assert about not in {d.about for d in caveats.board_caveats(boards(near)[0])}


def test_needles_by_length_and_depth() -> None:
    short = made(by={"depth": {"0.0": known(1, 0)}})
    long = made(
        by={"depth": {"100.0": known(3, 0), "0.0": known(2, 0)}},
        length=2048,
    )
    assert by_depth([long, short]) == ([1024, 2048], [0.0, 100.0], [[1.0, 2.0], [None, 3.0]])


def test_files_of_different_boards_differ() -> None:
    assert slugs(["A b", "a-b", "模型", "c"]) == ["a-b-1", "a-b-2", "3", "c"]


def _write(path: Path, results: Sequence[CellResult]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(one.model_dump_json() + "\n" for one in results), encoding="utf-8")
    return path


def test_records_of_several_folders_each_once(tmp_path: Path) -> None:
    one = _write(tmp_path / "one" / "records.jsonl", three())
    _write(tmp_path / "two" / "deep" / "records.jsonl", [made("m", "0.2")])
    assert load_results([tmp_path / "one", one, tmp_path]) == [*three(), made("m", "0.2")]


def test_a_cell_recorded_twice_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "one" / "records.jsonl", [made("m", "0.2")])
    _write(tmp_path / "two" / "records.jsonl", [made(), made("m", "0.2", (1.0, 1.0))])
    with pytest.raises(KvfoldError, match=r"a 1024, m 0\.2: .*line 1 of .*one.*line 2 of .*two"):
        load_results([tmp_path])


@pytest.mark.parametrize("line", ['{"half": ', '{"session": "another"}', "\xff"])
def test_what_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = _write(tmp_path / "records.jsonl", [made()])
    path.write_bytes(path.read_bytes() + line.encode("latin-1") + b"\n")
    with pytest.raises(KvfoldError, match=r"line 2 of .*records\.jsonl is no record"):
        load_results([path])


def test_nothing_to_report_is_said(tmp_path: Path) -> None:
    empty = _write(tmp_path / "records.jsonl", [])
    for given, words in ((empty, "no records"), (tmp_path / "not", "cannot read")):
        with pytest.raises(KvfoldError, match=words):
            load_results([given])
    empty.unlink()
    with pytest.raises(KvfoldError, match=r"no records\.jsonl in"):
        load_results([tmp_path])


@pytest.mark.slow
def test_the_command_writes_page_tables_and_pictures(tmp_path: Path) -> None:
    hidden = {"depth": {"0.0": known(50, 1), "100.0": known(90, 1)}}
    results = [
        *board(), made(task="niah", by=hidden),
        made("good $x^$ _", "0.2", (50.0, 1.0), (-40.0, -45.0, -35.0), "niah", by=hidden),
        made("good", None, (8.0, 0.1), task="perplexity", lower_is_better=True),
    ]  # fmt: skip
    _write(tmp_path / "run" / "records.jsonl", results)
    out = tmp_path / "report"
    ran = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    assert {path.name for path in out.iterdir()} == {
        "index.html", "report.md", "tasks.md", "records.csv", "pareto-question-agnostic.png",
        "pareto-question-agnostic.svg", "needles-niah-question-agnostic.png",
    }  # fmt: skip
    assert all(path.stat().st_size > 500 for path in out.iterdir())
    assert "Perplexity (lower is better)" in (out / "report.md").read_text(encoding="utf-8")
    again = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(out), "--json"])
    said = json.loads(again.stdout)
    assert {Path(path).name for path in said["files"]} == {path.name for path in out.iterdir()}
    assert all(claim["claim"] and claim["evidence"] for claim in said["claims"].values())


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("{}\n")
    ran = CliRunner().invoke(app, ["report", str(path)])
    assert ran.exit_code == 2
    assert f"line 1 of {path}" in ran.stderr


@pytest.mark.parametrize(
    "results",
    [
        [made()],
        [made("m", "0.2", (50.0, None))],
        [made("m", "0.2", score=None, nbytes=None, kept=None, errors={"broken": 3})],
        [made(task="chat", metric=None, score=None)],
        [made(lower_is_better=True)],
    ],
    ids=["full alone", "one sample", "only errors", "transcript", "perplexity"],
)
def test_little_is_reported_too(tmp_path: Path, results: list[CellResult]) -> None:
    written = write(results, tmp_path)
    assert written.paths[0].exists()
    assert markdown(boards(results)).startswith("# Results")
