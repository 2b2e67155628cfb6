# SPDX-License-Identifier: Apache-2.0
"""The pages that are tested, by name; a new kind of page is one more line of `PAGES`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from rich.text import Text

import kvfold
from kvfold.checks import page as check_page
from kvfold.cli import demo_page
from kvfold.eval.run.cell_result import CellResult
from kvfold.inspect import page as inspect_page
from kvfold.inspect.attention_maps import watch_attention
from kvfold.inspect.inspected_text import InspectedText
from kvfold.inspect.retention import measure_retention
from kvfold.report import page as report_page
from kvfold.report.board import boards
from kvfold.report.load import load_results
from kvfold.report.style import styles
from kvfold.report.summary import rows
from tests.helpers.checked import checked
from tests.helpers.reports import made

ROOT = Path(__file__).parents[1]
MANY = 40


def _report(results: list[CellResult]) -> str:
    every = boards(results)
    shown = [row for board in every for row in board.overall() + rows(board.perplexities)]
    return report_page.page(every, styles(shown))


def published() -> str:
    """Report of the published records: both protocols, needles, perplexity."""
    return _report(load_results([ROOT / "docs" / "results" / "bundled" / "records.jsonl"]))


def many_methods() -> str:
    """Report of `MANY` methods: long names, nearly the same bytes and scores, all columns."""
    counted = {"prefill_operations": 3e11, "step_operations": 2e8, "answer_tokens": 9.0}
    results = [
        made(task=task, score=(90.0, 1.0), haystack="book.txt", **counted) for task in ("a", "b")
    ]
    for number in range(MANY):
        name = f"method_{number:02}:option=value,window={number}"
        for task in ("a", "b"):
            for budget, lost in (("0.5", number / 4), ("0.2", 30 + number / 2)):
                gap = (-lost, -lost - 2, 2 - lost)
                score = (90 - lost, 1.0)
                own = made(name, budget, score, gap, task, haystack="book.txt", **counted)
                results.append(own)
    return _report(results)


def inspected() -> str:
    """Inspection of a generated text on the bundled model, by six methods."""
    model, tokenizer = kvfold.bundled_model()
    document = InspectedText.with_needles(tokenizer, 500, seed=1)
    named = ("snapkv", "pyramidkv", "kvzip", "h2o", "knorm", "tova")
    retentions = [
        measure_retention(model, tokenizer, document, method, kvfold.Budget.ratio(0.3))
        for method in named
    ]
    return inspect_page.page(
        "bundled model", document, watch_attention(model, document.ids), retentions
    )


def demo() -> str:
    """The demo's page, of a long line, a dim one and an empty picture."""
    parts = [Text("a line of the demo's output " * 8), Text("an answer", style="dim")]
    return demo_page.page(parts, Figure(figsize=(9, 3)))


def check() -> str:
    """A check of nine methods, one of them certified."""
    return check_page.page(checked(methods=9))


PAGES = {
    "published": published,
    "many_methods": many_methods,
    "inspected": inspected,
    "demo": demo,
    "check": check,
}
