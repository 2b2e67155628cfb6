# SPDX-License-Identifier: Apache-2.0
"""Tables of every cell behind docs/claims.md: each one of the records, and nothing else."""

from __future__ import annotations

import pytest

from docs.generate import claims as bench
from kvfold.report.load import load_results


def columns(table: str) -> dict[tuple[str, str], str]:
    """Texts of a table's cells, by method and budget."""
    head, _, *rows = [line for line in table.splitlines() if line.startswith("|")]
    budgets = [cell.strip() for cell in head.strip("|").split("|")][1:]
    found = {}
    for line in rows:
        method, *texts = [cell.strip() for cell in line.strip("|").split("|")]
        found |= {(method.strip("`"), b): t for b, t in zip(budgets, texts, strict=True) if t}
    return found


@pytest.mark.whole
def test_every_cell_of_the_records_is_shown():
    steps = bench.steps(bench.load()[1])
    shown = list(bench.tables(bench.RECORDS, steps))
    ran = [step for step in steps if (bench.RECORDS / step / "records.jsonl").exists()]
    assert len(shown) == len(ran) == 10
    for step, table in zip(ran, shown, strict=True):
        results = load_results([bench.RECORDS / step / "records.jsonl"])
        cells = columns(table)
        wanted = {(r.cell.method, r.cell.budget or "no budget") for r in results}
        assert set(cells) == wanted
        for result in results:
            text = cells[result.cell.method, result.cell.budget or "no budget"]
            scores = [float(part) for part in text.partition(" (")[0].split(" / ")]
            assert min(abs(score - result.score.value) for score in scores) < 0.051
    assert shown[-1] in bench.page()


def test_a_cell_has_the_scores_of_all_tasks_and_the_mean_part_kept():
    (table,) = bench.tables(bench.RECORDS, ["simlayerkv", "never_run"])
    assert "points in noise / points in the novel (part kept)." in table
    cells = columns(table)
    assert cells["simlayerkv:window=128", "no budget"] == "47.5 / 27.5 (0.74)"
    assert ("simlayerkv:window=128", "0.5") not in cells
