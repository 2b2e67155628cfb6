# SPDX-License-Identifier: Apache-2.0
"""Tables in CSV and Markdown: every field, names escaped."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

from kvfold.eval.run.cell_result import CellResult
from kvfold.report import summary
from kvfold.report.board import boards
from kvfold.report.headline import signed
from kvfold.report.page import payload
from kvfold.report.style import styles
from kvfold.report.tables import by_budget, by_task, markdown, to_csv
from tests.helpers.reports import HOSTILE, MODEL, known, made


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


def test_markdown_escapes_names() -> None:
    results = [made(task="a|b`<b>"), made(HOSTILE, "0.2", (80.0, 1.0), (-10.0, -12.0, -8.0))]
    text = markdown(boards(results))
    assert "<" not in text.replace("&lt;", "") and HOSTILE not in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {11}


def test_markdown_escapes_all_that_a_record_tells_of_its_model_and_budget() -> None:
    subject = MODEL.model_copy(update={"dtype": HOSTILE, "attention": f"a|{HOSTILE}"})
    lines = [made(subject=subject), made("m", "0.2", subject=subject)]
    lines[1] = lines[1].model_copy(
        update={"cell": lines[1].cell.model_copy(update={"budget": HOSTILE})}
    )
    for text in (markdown(boards(lines)), by_task(boards(lines))):
        assert "&lt;img" in text and "<" not in text
        table = [line for line in text.splitlines() if line.startswith("|")]
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {11}


def test_operations_stand_in_place_of_seconds_where_they_were_counted() -> None:
    counted = {"prefill_operations": 2e11, "step_operations": 1e8, "answer_tokens": 4.0}
    plain = markdown(boards([made(), made("m", "0.2")]))
    assert "| prefill |" in plain and "operations" not in plain
    text = markdown(boards([made(**counted), made("m", "0.2", **counted)]))
    assert "| prefill |" not in text and "| operations | length |" in text
    assert "operations: of a prefill" in text
    assert re.search(r"\| m \|.*\| 1.00× / 1.00× \| 1.00× \|", text)


def test_lengths_stand_beside_scores_also_where_nothing_was_counted() -> None:
    text = markdown(boards([made(answer_tokens=4.0), made("m", "0.2", answer_tokens=6.0)]))
    assert "| length | prefill |" in text and "operations" not in text
    assert "length: of answers in tokens" in text
    assert re.search(r"\| m \|.*\| 1.50× \| [^|]* \| 100 \|", text)
    plain = markdown(boards([made(), made("m", "0.2")]))
    assert "length" not in plain
    lower = {"answer_tokens": 4.0, "metric": "perplexity", "lower_is_better": True}
    perplexities = markdown(boards([made(**lower), made("m", "0.2", **lower)]))
    assert "| length |" not in perplexities


def test_markdown_says_what_is_inside_the_noise() -> None:
    results = [made(), made("m", "0.2", (89.0, 1.0), (-1.0, -3.0, 1.0))]
    assert "| ≈ −1.0 (−3.0 to +1.0) |" in markdown(boards(results))
    assert (signed(-0.04), signed(2.0), signed(-2.0)) == ("0.0", "+2.0", "−2.0")


def test_rows_that_lack_tasks_stand_below_the_others_of_their_budget() -> None:
    results = [made(task=task) for task in "ab"]
    results += [made("easy", "0.2", (99.0, 1.0), task="a")]
    results += [made("whole", "0.2", (60.0, 1.0), task=task) for task in "ab"]
    overall = by_budget(summary.rows(results))
    assert [row.method for row in overall] == ["full", "whole", "easy"]


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


def test_perplexities_of_unlike_texts_stand_in_tables_of_their_own() -> None:
    def read(*data: str, score: float = 7.0) -> list[CellResult]:
        result = made(task="continuation", score=(score, 1.0), lower_is_better=True)
        cell = result.cell.model_copy(update={"data": data})
        return [result.model_copy(update={"cell": cell})]

    results = [*read("book.txt", "book.txt"), *read("code.py", score=3.0)]
    text = markdown(boards(results))
    shown = payload(boards(results), styles(summary.rows(results)))["boards"][0]["texts"]

    for name, score in (("book.txt", 7.0), ("code.py", 3.0)):
        start = f"### Perplexity of {name} (continuation), lower is better\n\n| "
        assert start in text and f" {score} " in text.partition(start)[2].partition("###")[0]
    assert [each["name"] for each in shown] == ["book.txt (continuation)", "code.py (continuation)"]
    assert [len(each["rows"]) for each in shown] == [1, 1]
    assert "### Perplexity of continuation," in markdown(boards(read()))
