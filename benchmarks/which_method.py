# SPDX-License-Identifier: Apache-2.0
"""docs/which-method.md, made of the published records: `python benchmarks/which_method.py`.

`publish_real.py` writes it too. Equal records give an equal page.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import long_page
import match_page
import numpy as np
import real_page
from long_answers_kl import AnswerDistance
from match_kl import Row
from real_page import and_list

from kvfold.eval.run.cell import FULL
from kvfold.eval.run.cell_result import CellResult
from kvfold.eval.run.run_folder import RECORDS
from kvfold.methods.description import shortest
from kvfold.report.board import Board, boards, haystacks
from kvfold.report.load import load_results
from kvfold.report.style import BASELINES
from kvfold.report.summary import ReportRow

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "which-method.md", ROOT / "docs" / "results"
COLUMNS = ("budget", "method", "score", "bytes", "operations")
BEST = 3  # methods of a budget in a table
ONE_PREFILL = 1.1  # operations until the first token, over the full cache's
LOST = 10  # points that a method without a budget may lose
SMALL = 0.1
HEAD = f"""\
# Which method for which job

The best methods of each job by the published records of {real_page.MODEL}. Other models and
texts may order them differently: [check your prompts](check.md).

In short: `kvzip`, or after `kvfold fit` `zap`, which needs no second forward, both before the
question is known and with it in view; all entries in fewer bits: `turboquant`; long answers:
`h2o:decode=append + every`.

Budgets are the kept part of the entries. Scores are in percent, with their 95 % intervals: means
over the needles at 1024 tokens that every method is run on. Bytes and operations are
relative to the full cache: operations of the prefill with its compression, then of a token of the
answer. Of equal
scores, the one with fewer operations until the first token comes first, then the one with fewer
bytes. Methods whose intervals overlap are not told apart: [all results](results/README.md)."""
FREE = "These have no budget: what they keep or encode follows from their options and the text."
LONG = """\
Mean KL to the full cache's predictions while an answer of 1024 tokens is read, after the first
eviction. All evict in rounds and hold the budget's entries beside the prompt.
[Answering long](answering-long.md) says which methods hold their size, and how."""
EXTRA = f"""\
Methods whose prefill and compression take at most {ONE_PREFILL} × the full cache's operations.
`kvzip` and `kvzip_plus`, which take about twice as many, are left out."""
FAR = """\
Mean KL to the full cache over the 100 tokens that follow passages of novels, and answers about the
needles in them. In brackets are the answers of `kvzip` where they differ; MB are those of the
cache, and operations are over `kvzip`'s. [How small can a cache get](how-far-down.md)
has all of them. Scores at
0.1 and 0.05 are in the tables above."""
MADE = """\
This page is made by `python benchmarks/which_method.py` of the records in docs/results."""


def page(
    results: Sequence[CellResult], answers: Sequence[AnswerDistance], passages: Sequence[Row]
) -> str:
    """The whole page."""
    found = boards(real_page.core(results))
    parts = [HEAD]
    for board in found:
        parts += [f"## {_title(board)}", *_at_budgets(board)]
    parts += ["## Without a budget", FREE]
    for board in found:
        parts += _without_budget(board)
    parts += ["## Long answers", LONG, *_long(answers)]
    parts += ["## No extra prefill", EXTRA, _zap()]
    for board in found:
        parts += [f"### {_title(board)}, no extra prefill", *_at_budgets(board, ONE_PREFILL)]
    parts += ["## At a tenth and below", FAR, *_small(passages), MADE]
    return "\n\n".join(part for part in parts if part) + "\n"


def _title(board: Board) -> str:
    return board.when[0].upper() + board.when[1:]


def ranked(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """By score, then operations until the first token, both as tables show them, then bytes."""

    def place(row: ReportRow) -> tuple[float, float, float]:
        assert row.score
        operations = math.inf if row.prefill_operations is None else row.prefill_operations
        return -round(row.score.value, 1), round(operations, 2), row.bytes_ratio or math.inf

    return sorted(rows, key=place)


def _methods(board: Board) -> list[ReportRow]:
    """Rows on all tasks, but for the full cache and the baselines."""
    left_out = {FULL, *BASELINES}
    rows = board.overall()
    return [row for row in rows if row.complete and row.score and row.method not in left_out]


def _at_budgets(board: Board, most: float = math.inf) -> Iterator[str]:
    """The best of each budget, of methods with at most `most` operations until the first token."""
    budgets: dict[str, list[ReportRow]] = defaultdict(list)
    for row in _methods(board):
        if row.budget is not None and (row.prefill_operations or math.inf) <= most:
            budgets[row.budget].append(row)
    order = sorted(budgets, key=lambda budget: -(budgets[budget][0].kept_nominal or 0))
    best = {budget: ranked(budgets[budget])[:BEST] for budget in order}
    if best:
        firsts = {budget: shortest(rows[0].method) for budget, rows in best.items()}
        yield f"First of each budget: {_firsts(firsts)}. {_measured(board)}"
        yield real_page.table([row for rows in best.values() for row in rows], COLUMNS)


def _firsts(firsts: dict[str, str]) -> str:
    """The budgets that each method is the first of."""
    budgets: dict[str, list[str]] = defaultdict(list)
    for budget, name in firsts.items():
        budgets[name].append(budget)
    return "; ".join(f"`{name}` at {and_list(of)}" for name, of in budgets.items())


def _measured(board: Board) -> str:
    """Samples and haystacks."""
    counts = sorted({row.samples for row in _methods(board)})
    counted = " to ".join(dict.fromkeys(f"{count}" for count in (counts[0], counts[-1])))
    return f"Samples of a method: {counted}; haystack: {haystacks(board.scored) or 'none'}."


def _without_budget(board: Board) -> Iterator[str]:
    """Methods that lose few points, by bytes."""
    free = [row for row in _methods(board) if row.budget is None and row.gap]
    near = [row for row in free if row.gap and row.gap.value >= -LOST]
    near.sort(key=lambda row: row.bytes_ratio or math.inf)
    if near:
        yield f"### {_title(board)}, without a budget"
        names = and_list([f"`{shortest(row.method)}`" for row in near])
        yield (
            f"At most {LOST} points below the full cache, the fewest bytes first: {names}. "
            f"Methods that lose more: {len(free) - len(near)}."
        )
        yield real_page.table(near, [column for column in COLUMNS if column != "budget"])


def _long(answers: Sequence[AnswerDistance]) -> Iterator[str]:
    """The methods of the lowest KL at the smallest budget."""
    head, rule, *rows = long_page.kl_table(answers).splitlines()
    names = [re.findall(r"`(.+?)`", row)[0] for row in rows]
    place = names.index("random")
    at = min(answer.budget for answer in answers)
    yield (
        f"Lowest KL at {at} entries: {and_list([f'`{name}`' for name in names[:BEST]])}. Eviction "
        f"at random is number {place + 1} of {len(names)}."
    )
    yield "\n".join([head, rule, *rows[:BEST], rows[place]])


def _zap() -> str:
    """The scorer's KL over that of the method that it learns from."""
    sums: dict[float, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    texts = set()
    for line in (RESULTS / "zap" / "kl.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        texts.add((row["text"], row["seed"]))
        sums[row["kept"]][row["method"].partition(":file")[0]] += row["kl"]
    ratios = [f"{of['zap'] / of['kvzip']:.2f} at {kept:g}" for kept, of in sorted(sums.items())]
    return (
        f"`zap` needs a fitted scorer ([Fitted scorers](fit.md)). Its KL to the full cache, over "
        f"that of `kvzip`, is {and_list(ratios[::-1])}, over {len(texts)} passages of novels."
    )


def _small(passages: Sequence[Row]) -> Iterator[str]:
    """The methods of the lowest KL at each small budget."""
    rows = match_page.measured(passages, match_page.CORE)
    lines = [
        "| budget | method | KL | answers | MB | operations |",
        "|---:|---|---:|---|---:|---:|",
    ]
    firsts = {}
    for kept in match_page.budgets(row for row in rows if row.kept <= SMALL):
        pairs = [match_page.Pairs.of(rows, name, kept) for name in match_page.CORE]
        pairs.sort(key=lambda each: each.ratio())
        firsts[f"{kept:g}"] = pairs[0].own[0].method
        lines += [_line(kept, each) for each in pairs[:BEST]]
    texts = len({row.passage for row in rows})
    yield f"Lowest KL: {_firsts(firsts)} ({texts} passages)."
    yield "\n".join(lines)


def _line(kept: float, pairs: match_page.Pairs) -> str:
    own, base = pairs.own, pairs.base
    cells = [f"{kept:g}", f"`{own[0].method}`", f"{np.mean([row.kl for row in own]):.3f}"]
    cells += [match_page.answers(own, base), f"{np.mean([row.nbytes for row in own]) / 1e6:.2f}"]
    cells.append(f"{match_page.mean_ratio(own, base, 'operations'):.2f}×")
    return f"| {' | '.join(cells)} |"


def write(results: Sequence[CellResult], path: Path = PAGE) -> None:
    """Writes the page of `results` and of the other published records."""
    made = page(results, long_page.load_distances(), match_page.load())
    path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    write(load_results([RESULTS / RECORDS]))
