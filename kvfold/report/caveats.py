# SPDX-License-Identifier: Apache-2.0
"""Caveats: reasons to distrust parts of a report, in words."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvfold.eval.run.cell import FULL, RANDOM
from kvfold.eval.run.cell_result import CellResult, distinct
from kvfold.evidence.grouped import grouped
from kvfold.loading import BUNDLED
from kvfold.report.board import Board
from kvfold.report.style import BASELINES
from kvfold.report.summary import budgets, gap

# Samples below which a score is called uncertain.
FEW = 50
# Relative deviation of stored entries from the budget that is reported.
OFF_BUDGET = 0.05
# Points above guessing that a task needs to show a loss.
ROOM = 5.0
# Percent that guessing scores, by metric; 0 for others. Source: four choices each in
# THUDM/LongBench v2, OpenBMB/InfiniteBench (choice, code_debug) and microsoft/MInference scbench.
GUESSED = {"accuracy": 25.0, "option": 25.0}

# Caveat on the bundled model; its model card says the same.
REPEATED = (
    "the bundled model was trained on KVzip's own repeat prompt, in 15 % of the rows of its mixed "
    "stages, over documents with needles; other models were not"
)


# Reason why KVzip scores more at a smaller budget on the bundled model.
DISTRACTED = (
    "the smaller set is part of the larger one, so nothing is missing: what is kept beside the "
    "needles distracts a model of four layers; in the paper quality rises with the budget"
)


class Caveat(NamedTuple):
    """A topic, and one line for each case."""

    about: str
    lines: list[str]


def board_caveats(board: Board) -> list[Caveat]:
    """Caveats about one board; those without a case are left out."""
    every = (
        Caveat("The full cache itself is near guessing", _near_guessing(board.scored)),
        Caveat("KVzip's rows flatter it on this model", _trained_on(board)),
        Caveat("Insensitive: random eviction does as well as the full cache",
               _insensitive(board.scored)),
        Caveat("Few samples", _few_samples(board.scored)),
        Caveat("Not every task was run", _incomplete(board)),
        Caveat("Rows that every table should have are missing", _missing_baselines(board)),
        Caveat("Stored entries deviate from the budget", _off_budget(board.results)),
        Caveat("A larger budget scores less, beyond the noise", _inverted_budgets(board)),
        Caveat("Truncated prompts", _truncated(board.results)),
        Caveat("Answers that reached max_new_tokens, compressed while decoding", _cut_off(board)),
        Caveat("Samples without an answer", _by_reason(board.results, "errors")),
        Caveat("Answers that could not be parsed or scored", _by_reason(board.results, "failed")),
        Caveat("Several machines or versions: times are not compared across them",
              _machines(board.results)),
        Caveat("The code was not one clean commit", _commits(board.results)),
        Caveat("No score", _unscored(board.results)),
    )  # fmt: skip
    return [caveat for caveat in every if caveat.lines]


def _inverted_budgets(board: Board) -> list[str]:
    """Methods that score more at a budget than at the next larger one, 95 % intervals disjoint."""
    rows = [row for row in board.overall() if row.score and row.kept_nominal is not None]
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        known = board.subject.name == BUNDLED and method.partition(":")[0] == "kvzip"
        own = [(row, row.score) for row in rows if row.method == method and row.score]
        own.sort(key=lambda pair: pair[0].kept_nominal or 0.0)
        for (less, one), (more, other) in itertools.pairwise(own):
            if one.low is not None and other.high is not None and one.low > other.high:
                lines.append(
                    f"{method}: {one.value:.1f} at {less.budget}, and {other.value:.1f} at "
                    f"{more.budget}{f'; {DISTRACTED}' if known else ''}"
                )
    return lines


def near_guessing(result: CellResult) -> bool:
    """True if a full cache's score is too close to guessing to show a loss.

    Too close means within `ROOM` points, or within the score's own 95 % interval.
    """
    if result.score is None or result.lower_is_better:
        return False
    low = result.score.value if result.score.low is None else result.score.low
    room = max(ROOM, result.score.value - low)
    return result.score.value - GUESSED.get(result.metric or "", 0.0) < room


def _near_guessing(results: Sequence[CellResult]) -> list[str]:
    """Tasks whose full cache scores near guessing."""
    return [
        f"{_unit(r)}: {r.score.value:.1f} with a full cache, where guessing gives about "
        f"{GUESSED.get(r.metric or '', 0.0):.0f}"
        for r in results
        if r.cell.method == FULL and r.score and near_guessing(r)
    ]


def _trained_on(board: Board) -> list[str]:
    """KVzip variants on the bundled model, which was trained on KVzip's repeat prompt."""
    methods = dict.fromkeys(r.cell.method for r in board.results)
    names = [name for name in methods if name.startswith("kvzip")]
    return [f"{_listed(names)}: {REPEATED}"] if names and board.subject.name == "bundled" else []


def _insensitive(results: Sequence[CellResult]) -> list[str]:
    """Tasks on which random eviction at the smallest budget shows no loss beyond the noise."""
    smallest = budgets(results)[-1:]
    lines = []
    for result in results:
        if result.cell.method == RANDOM and result.cell.budget in smallest:
            loss = gap([result])
            if loss is not None and loss.is_noise:
                lines.append(f"{_unit(result)}: no difference that {result.samples} samples show "
                             f"at {result.cell.budget}")  # fmt: skip
    return lines


def _few_samples(results: Sequence[CellResult]) -> list[str]:
    """Tasks with fewer than `FEW` samples, and the resulting uncertainty of a mean."""
    least: dict[str, int] = {}
    for result in results:
        if 0 < result.samples < FEW:
            unit = _unit(result)
            least[unit] = min(least.get(unit, FEW), result.samples)
    units = grouped((count, unit) for unit, count in least.items())
    return [
        f"{_listed(names)}: {count} samples; with half of them right, a mean is known to "
        f"±{100 * 1.96 * math.sqrt(0.25 / count):.0f} points"
        for count, names in units.items()
    ]


def _incomplete(board: Board) -> list[str]:
    """Methods without a score on some of the board's tasks."""
    units = {result.cell.reference: _unit(result) for result in board.scored}
    present = grouped((_subject(r), r.score and r.cell.reference) for r in board.scored)
    lacking = grouped(
        (tuple(unit for cell, unit in units.items() if cell not in known), name)
        for name, known in present.items()
    )
    return [
        f"{_listed(names)}: without {_listed(missing)}; left out of frontier and ranking"
        for missing, names in lacking.items()
        if missing
    ]


def _missing_baselines(board: Board) -> list[str]:
    """Baselines that were not run."""
    known = {result.cell.method for result in board.results}
    return [f"{name} ({what})" for name, what in BASELINES.items() if name not in known]


def _off_budget(results: Sequence[CellResult]) -> list[str]:
    """Worst deviation from the budget of each method, if above `OFF_BUDGET`."""
    worst: dict[str, CellResult] = {}
    for result in results:
        if result.kept_nominal and result.kept is not None:
            known = worst.get(_subject(result))
            if known is None or _budget_error(result) > _budget_error(known):
                worst[_subject(result)] = result
    return [
        f"{name}: {result.kept:.3f} of the entries on {_unit(result)}"
        for name, result in worst.items()
        if _budget_error(result) > OFF_BUDGET
    ]


def _budget_error(result: CellResult) -> float:
    assert result.kept is not None and result.kept_nominal is not None
    return abs(result.kept / result.kept_nominal - 1)


def _truncated(results: Sequence[CellResult]) -> list[str]:
    """Tasks with truncated prompts, and their number in the worst cell."""
    most: dict[str, CellResult] = {}
    for result in results:
        if result.truncated and result.truncated > most.get(_unit(result), result).truncated - 1:
            most[_unit(result)] = result
    return [
        f"{unit}: {r.truncated} of {r.samples} samples, rule “{r.truncation}”, at "
        f"{r.cell.protocol.max_length:,} tokens"
        for unit, r in most.items()
    ]


def _cut_off(board: Board) -> list[str]:
    """Cells of decoding tasks with more than 10 % of answers at their limit."""
    return [
        f"{_unit(r)}, {_subject(r)}: {r.at_limit} of {r.questions} answers"
        for r in board.results
        if r.phase == "decode" and r.questions and r.at_limit > 0.1 * r.questions
    ]


def _by_reason(results: Sequence[CellResult], field: str) -> list[str]:
    """Counts in the results' `field`, a dictionary by reason, with the cells concerned."""
    found = [(of, str(r.cell), count) for r in results for of, count in getattr(r, field).items()]
    counts, places = Counter[str](), grouped((reason, cell) for reason, cell, _ in found)
    for reason, _, count in found:
        counts[reason] += count
    return [
        f"{count} × {reason} ({_listed(places[reason], mark='; ')})"
        for reason, count in counts.most_common()
    ]


def _machines(results: Sequence[CellResult]) -> list[str]:
    """Differences of each further setup from the first one."""
    setups = distinct(setup for result in results for setup in result.setups)
    return ["; ".join(setup.differences(setups[0])) for setup in setups[1:]]


def _commits(results: Sequence[CellResult]) -> list[str]:
    """Different commits, and commits with uncommitted changes."""
    commits = list(dict.fromkeys(commit for result in results for commit in result.commits))
    lines = [f"recorded at {_listed(map(str, commits))}"] if len(commits) > 1 else []
    dirty = [commit for commit in commits if commit and commit.endswith("-dirty")]
    return lines + [f"{commit}: with uncommitted changes" for commit in dirty]


def _unscored(results: Sequence[CellResult]) -> list[str]:
    """Tasks that have results without a score."""
    names = dict.fromkeys(_unit(result) for result in results if result.score is None)
    return [f"{name}: not in the means of one or more methods" for name in names]


def _unit(result: CellResult) -> str:
    cell = result.cell
    return cell.task if cell.length is None else f"{cell.task} at {cell.length:,} tokens"


def _subject(result: CellResult) -> str:
    cell = result.cell
    return cell.method if cell.budget is None else f"{cell.method} at {cell.budget}"


def _listed(names: Iterable[str], most: int = 4, mark: str = ", ") -> str:
    known = list(names)
    rest = len(known) - most
    return mark.join(known[:most]) + (f" and {rest} more" if rest > 0 else "")
