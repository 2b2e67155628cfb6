# SPDX-License-Identifier: Apache-2.0
"""Numbers of README.md and docs/: each has a source, and records still hold theirs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from docs.generate import figures as pages_figures

ROOT = Path(__file__).parents[2]
RESULTS = "docs/results/bundled/README.md", "Results"


@pytest.fixture
def figures() -> ModuleType:
    return pages_figures


@pytest.mark.slow
def test_every_number_has_a_source(figures: ModuleType) -> None:
    assert figures.faults() == []


@pytest.mark.whole
def test_a_number_that_is_off_by_its_last_digit_is_noticed(figures: ModuleType) -> None:
    """In at least nine of ten places: a wrong number may be another value of the same method."""
    entry = figures.ledger()[RESULTS]
    (section,) = (one for one in figures.sections(RESULTS[0]) if one.heading == RESULTS[1])
    parts = [
        figures.Section(*RESULTS, changed)
        for text in section.text.split("\n\n")
        for number in re.finditer(r"(?<![\w.`=])\d+\.\d(?![\d`])(?! at| of 0)", text)
        for changed in [
            f"{text[: number.start()]}{float(number[0]) + 0.1:.1f}{text[number.end() :]}"
        ]
    ]
    noticed = [bool(list(figures.unrecorded(part, entry))) for part in parts]

    assert len(parts) > 60
    assert sum(noticed) >= 0.9 * len(parts), f"{sum(noticed)} of {len(parts)}"


def test_what_is_no_measurement_is_left_out(figures: ModuleType) -> None:
    text = (
        "Takes 0.52 × and −3.1 points at 16 384 tokens; `kept=0.3`, arXiv 2406.02069, section 3, "
        "Python 3.11, 4-bit KIVI, H2O, a [link](page-2.md), 95 % intervals, Apache-2.0, 1,024.\n"
        "```\n--length 77\n```"
    )

    assert figures.numbers(text) == ["0.52", "−3.1", "16 384", "1,024"]


def test_a_digest_changes_with_a_number_and_with_nothing_else(figures: ModuleType) -> None:
    def digest(text: str) -> str:
        return figures.digest(figures.Section("page", "heading", text))

    assert digest("takes 0.52 × as long") == digest("It takes 0.52 ×.")
    assert digest("takes 0.52 ×") != digest("takes 0.53 ×")


def test_an_entry_without_its_section_is_a_fault(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "pages", lambda: ["docs/auto.md"])
    monkeypatch.setattr(figures, "ledger", lambda: {("docs/auto.md", "Gone"): {}})

    found = figures.faults()

    assert "docs/auto.md, Gone: no such section" in found
    assert "docs/auto.md, How well it predicts: 0.53 has no source" in found


def test_the_table_of_the_bundled_model_is_that_of_its_file() -> None:
    known = json.loads(
        (ROOT / "docs" / "results" / "bundled" / "quality.json").read_text(encoding="utf-8")
    )
    scores = {
        (r["method"], r["kept"], r["question_aware"]): f"{r['score']:.0f}" for r in known["records"]
    }
    page = (ROOT / "docs/results/bundled/scores.md").read_text(encoding="utf-8")
    table = page.partition("| method | aware, kept 0.2 |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    cells = [(kept, aware) for kept in (0.2, 0.1) for aware in (True, False)]

    assert rows[0] == ["full cache", scores["full", None, True], "", "", ""]
    assert [row[0] for row in rows[1:]] == ["snapkv", "pyramidkv", "h2o", "streaming_llm", "random"]
    for method, *stated in rows[1:]:
        assert stated == [scores[method, *cell] for cell in cells]
