# SPDX-License-Identifier: Apache-2.0
"""Every cell of the records behind docs/claims.md, as tables: also what no test compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean

from docs.generate.claims_evidence import RECORDS, UNITS, rounded
from docs.generate.made import table
from kvfold.eval.run.cell_result import CellResult
from kvfold.report.load import load_results

NO_BUDGET = "no budget"


def tables(records: Path, steps: Sequence[str]) -> Iterator[str]:
    """A table for each step that has records: scores of all tasks, and the part kept."""
    for step in steps:
        path = records / step / RECORDS
        if path.exists():
            yield _table(step, load_results([path]))


def _table(step: str, results: Sequence[CellResult]) -> str:
    cells: dict[str, dict[str, list[CellResult]]] = {}
    for result in results:
        found = cells.setdefault(result.cell.method, {})
        found.setdefault(result.cell.budget or NO_BUDGET, []).append(result)
    budgets = list(dict.fromkeys(budget for each in cells.values() for budget in each))
    tasks = list(dict.fromkeys(result.cell.task for result in results))
    rows = [[f"`{method}`", *_scores(each, budgets, tasks)] for method, each in cells.items()]
    told = f"{' / '.join(UNITS.get(task, task) for task in tasks)} (part kept)."
    return f"### {step}\n\n{told}\n\n{table(['method', *budgets], rows)}\n"


def _scores(
    by_budget: Mapping[str, Sequence[CellResult]], budgets: Sequence[str], tasks: Sequence[str]
) -> Iterator[str]:
    """A method's scores by task at each budget, with the mean part kept."""
    for budget in budgets:
        found = {result.cell.task: result for result in by_budget.get(budget, ())}
        scores = [found[task].score for task in tasks if task in found]
        kept = [result.kept for result in found.values() if result.kept is not None]
        text = " / ".join(_text(score.value, found) for score in scores if score is not None)
        yield f"{text} ({rounded(mean(kept), 2)})" if kept else text


def _text(value: float, found: Mapping[str, CellResult]) -> str:
    """A score; perplexities differ in the second digit."""
    return rounded(value, 2 if any(each.lower_is_better for each in found.values()) else 1)
