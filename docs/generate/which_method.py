# SPDX-License-Identifier: Apache-2.0
"""Parts of docs/which-method.md, of the published records: `python -m docs.generate.which_method`.

`docs/generate/publish_real.py` writes it too. Equal records give an equal page.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from docs.generate import long_page, match_page, needle_rows, paired
from docs.generate.made import DOCS, RESULTS, and_list, table, with_parts
from docs.generate.needle_rows import core
from docs.results.long.measure_kl import AnswerDistance
from docs.results.match.measure import Row
from kvfold.eval.run.cell import FULL
from kvfold.eval.run.cell_result import CellResult
from kvfold.eval.run.run_folder import RECORDS
from kvfold.evidence.grouped import grouped
from kvfold.methods.description import shortest, without_files
from kvfold.report.board import Board, boards, haystacks, readable
from kvfold.report.load import load_results
from kvfold.report.style import BASELINES
from kvfold.report.summary import ReportRow

PAGE = DOCS / "which-method.md"
BEST = 3  # methods of a budget in a table
# The prose of the page names these two, as well.
ONE_PREFILL = 1.1  # operations until the first token, over the full cache's
CLOSE, SMALLEST = 2, 5  # points that the smallest caches may lose, and how many are shown
LOST = 10  # points that a method without a budget may lose
SMALL = 0.1
LIGHT = 0.9  # bytes over those of another method
SMALL_COLUMNS = ["budget", "method", "KL", "needles", "kvzip's", "MB", "operations"]
LEADERBOARD = "0.2"  # the budget whose bytes stand beside long answers
UUIDS = ("ruler_niah_single_3", 1024, False)


class Published(NamedTuple):
    """Records of the leaderboard and its samples, of long answers, and of passages of novels."""

    results: Sequence[CellResult]
    samples: paired.Samples
    answers: Sequence[AnswerDistance]
    passages: Sequence[Row]


def page(of: Published) -> str:
    """The page: its prose, which is written by hand, and what the records say."""
    found = boards(core(of.results))
    budgets, light = list[str](), [_zap()]
    for board in found:
        budgets += [f"## {_title(board)}", *_at_budgets(board, of)]
        light += [f"### {_title(board)}, no extra prefill", *_at_budgets(board, of, ONE_PREFILL)]
    parts = {
        "in short": [_in_short(of)],
        "budgets": budgets,
        "fewest bytes": [part for board in found for part in _fewest_bytes(board)],
        "without a budget": [part for board in found for part in _without_budget(board)],
        "long answers": _long(of),
        "no extra prefill": light,
        "small": _small(of.passages),
    }
    return with_parts(PAGE, "which_method", {name: "\n\n".join(p) for name, p in parts.items()})


def _in_short(of: Published) -> str:
    """The choice for each job, and where the second choice fails."""
    scores = {
        without_files(one.cell.method): one.score.value
        for one in of.results
        if one.score
        and (one.cell.task, one.cell.length, one.cell.protocol.question_aware) == UUIDS
        and one.cell.budget in ("0.1", None)
    }
    methods = ("zap", "kvzip", FULL)
    found = [f"{scores[method]:g} %" for method in methods if method in scores]
    fails = (
        f" (at 0.1 it finds {found[0]} of UUIDs in a novel, `kvzip` {found[1]}, the full cache "
        f"{found[2]})"
        if len(found) == len(methods)
        else ""
    )
    long_answers = f"{long_page.ranked(of.answers)[0]} + every:prompt=kept"
    return (
        "In short: `kvzip`; at budgets of 0.2 and more `zap`, which needs no second forward but a "
        f"`kvfold fit`{fails}; at 0.05 the first of each table; {_fewest(of)}all entries in fewer "
        f"bits: `turboquant`; long answers: `{long_answers}`{_of_answers(of)}."
    )


def _of_answers(of: Published) -> str:
    """On how few answers the choice for long ones rests."""
    first, *_ = long_page.ranked(of.answers)
    answers = len({row.answer for row in of.answers if row.method == first})
    return f" (by {answers} answers, which [do not tell it apart](#long-answers) from others)"


def _fewest(of: Published) -> str:
    """The method of the fewest bytes, where the leaderboard has any."""
    rows = [row for board in boards(core(of.results))[:1] for row in smallest(board)]
    return f"fewest bytes: `{shortest(rows[0].method)}`; " if rows else ""


def _title(board: Board) -> str:
    return board.when[0].upper() + board.when[1:]


def ranked(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """By score, then operations until the first token, both as tables show them, then bytes."""

    def place(row: ReportRow) -> tuple[float, float, float]:
        assert row.score
        operations = math.inf if row.prefill_operations is None else row.prefill_operations
        return -round(row.score.value, 1), round(operations, 2), row.bytes_ratio or math.inf

    return sorted(rows, key=place)


def _top(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Rows of the highest score, as tables show it."""
    highest = needle_rows.mean(max(rows, key=needle_rows.value))
    return [row for row in rows if needle_rows.mean(row) == highest]


def _methods(board: Board) -> list[ReportRow]:
    """Rows on all tasks, but for the full cache and the baselines."""
    left_out = {FULL, *BASELINES}
    rows = board.overall()
    return [row for row in rows if row.complete and row.score and row.method not in left_out]


def _at_budgets(board: Board, of: Published, most: float = math.inf) -> Iterator[str]:
    """The best of each budget, of methods with at most `most` operations until the first token."""
    budgets = grouped(
        (row.budget, row)
        for row in _methods(board)
        if row.budget is not None and (row.prefill_operations or math.inf) <= most
    )
    order = sorted(budgets, key=lambda budget: -(budgets[budget][0].kept_nominal or 0))
    best = {budget: ranked(budgets[budget])[:BEST] for budget in order}
    if best:
        firsts = {budget: rows[0] for budget, rows in best.items()}
        names = {budget: needle_rows.name(row) for budget, row in firsts.items()}
        alike = {budget: len(_top(budgets[budget])) for budget in order}
        counts = and_list([f"{count} at {budget}" for budget, count in alike.items()])
        yield f"First of each budget: {_firsts(names)}. {_haystack(board)}"
        yield f"Methods of the highest mean: {counts}; at most {BEST} are shown, the cheapest ones."
        columns: dict[str, needle_rows.Column] = {"budget": lambda row: row.budget or ""}
        columns["method"] = needle_rows.name
        columns |= needle_rows.haystack_columns(board)
        columns["− first (95 %)"] = _behind(board, of, firsts)
        columns |= needle_rows.COSTS | {"n": needle_rows.samples_column(board)}
        yield needle_rows.table([row for rows in best.values() for row in rows], columns)


def _behind(board: Board, of: Published, firsts: dict[str, ReportRow]) -> needle_rows.Column:
    """The difference to the first row of a budget, on the samples that both have."""
    known = core(of.results)
    names = {
        short.cell.method: one.cell.method
        for one, short in zip(known, readable(known), strict=True)
    }
    samples = {
        unit: cells
        for unit, cells in of.samples.items()
        if (unit.task, int(unit.length or 0)) in needle_rows.CORE
    }

    def behind(row: ReportRow) -> str:
        first = firsts[row.budget or ""]
        if row is first:
            return ""
        ours, theirs = (f"{names[one.method]}@{one.budget}" for one in (row, first))
        try:
            return needle_rows.gap(paired.gap(samples, ours, theirs, board.question_aware))
        except SystemExit:  # no samples of both
            return needle_rows.NONE

    return behind


def _firsts(firsts: dict[str, str]) -> str:
    """The budgets that each method is the first of."""
    budgets = grouped((name, budget) for budget, name in firsts.items())
    return "; ".join(f"`{name}` at {and_list(of)}" for name, of in budgets.items())


def _haystack(board: Board) -> str:
    return f"Haystack: {haystacks(board.scored) or 'none'}."


def smallest(board: Board) -> list[ReportRow]:
    """Rows about as good as the full cache, the fewest bytes first, one of each method."""
    near = [row for row in _methods(board) if row.gap and row.gap.value >= -CLOSE]
    found = dict[str, ReportRow]()
    for row in sorted(near, key=lambda row: row.bytes_ratio or math.inf):
        found.setdefault(row.method, row)
    return list(found.values())


def _fewest_bytes(board: Board) -> Iterator[str]:
    """The methods of the fewest bytes, among those about as good as the full cache."""
    if rows := smallest(board)[:SMALLEST]:
        yield f"### {_title(board)}, fewest bytes"
        columns: dict[str, needle_rows.Column] = {"method": needle_rows.name}
        columns["budget"] = lambda row: row.budget or ""
        yield needle_rows.table(rows, columns | _beside_full(board))


def _beside_full(board: Board) -> dict[str, needle_rows.Column]:
    """Columns of scores, of the difference to the full cache, and of costs."""
    columns = needle_rows.haystack_columns(board)
    columns["− full (95 %)"] = lambda row: needle_rows.gap(row.gap)
    return columns | needle_rows.COSTS | {"n": needle_rows.samples_column(board)}


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
        columns: dict[str, needle_rows.Column] = {"method": needle_rows.name}
        yield needle_rows.table(near, columns | _beside_full(board))


def _long(of: Published) -> Iterator[str]:
    """The methods of the lowest KL at the smallest budget, and their bytes on the leaderboard."""
    columns, rows = long_page.kl_table(of.answers)
    names = long_page.ranked(of.answers)
    place = names.index("random")
    yield f"{long_page.alike(of.answers)} Eviction at random is number {place + 1} of {len(names)}."
    held = {
        needle_rows.name(row): needle_rows.nbytes(row)
        for board in boards(core(of.results))[:1]
        for row in board.overall()
        if row.budget == LEADERBOARD
    }
    shown = [*range(BEST), place]
    sizes = [held.get(names[at].partition(":")[0], needle_rows.NONE) for at in shown]
    lines = [[*rows[at], size] for at, size in zip(shown, sizes, strict=True)]
    yield table([*columns, "bytes"], lines)


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
        f"that of `kvzip`, is {and_list(ratios[::-1])}, over {len(texts)} passages of novels, "
        "[mostly by its window](results/zap/README.md#what-zap-reaches) of 16 tokens."
    )


def _small(passages: Sequence[Row]) -> Iterator[str]:
    """Methods of the lowest KL at each small budget: of those with all passages, then of all."""
    rows = match_page.measured(passages, match_page.CORE)
    lines, firsts = list[list[str]](), {}
    for kept in _small_budgets(rows):
        found = _by_kl(rows, kept)
        firsts[f"{kept:g}"] = found[0].own[0].method
        lines += [_cells(kept, each) for each in found[:BEST]]
    texts = len({row.passage for row in rows})
    yield (
        f"Lowest KL of the {len(match_page.CORE)} methods with {texts} passages: {_firsts(firsts)}."
    )
    yield table(SMALL_COLUMNS, lines, [1])
    every = match_page.measured(passages, list(dict.fromkeys(row.method for row in passages)))
    lines = []
    for kept in _small_budgets(every):
        (known,) = [one for one in _by_kl(every, kept) if one.own[0].method == firsts[f"{kept:g}"]]
        lower = [one for one in _by_kl(every, kept) if _smaller(one, known)]
        lines += [_cells(kept, each) for each in [*lower[:BEST], known] if lower]
    if lines:
        texts = len({row.passage for row in every})
        yield (
            f"All methods were run on {texts} of the passages. The last row of each budget is the "
            "method with the lowest KL above; the rows before it have a lower KL in at most "
            f"{LIGHT} × its bytes:"
        )
        yield table(SMALL_COLUMNS, lines, [1])


def _small_budgets(rows: Sequence[Row]) -> list[float]:
    return match_page.budgets(row for row in rows if row.kept <= SMALL)


def _by_kl(rows: Sequence[Row], kept: float) -> list[match_page.Pairs]:
    """All methods at a budget, the lowest KL first."""
    names = dict.fromkeys(row.method for row in rows)
    found = [match_page.Pairs.of(rows, name, kept) for name in names]
    return sorted(found, key=lambda each: each.ratio())


def _smaller(one: match_page.Pairs, other: match_page.Pairs) -> bool:
    """True for a lower KL in clearly fewer bytes."""
    fewer = one.mean("nbytes") <= LIGHT * other.mean("nbytes")
    return fewer and one.ratio() < other.ratio()


def _cells(kept: float, pairs: match_page.Pairs) -> list[str]:
    own, base = pairs.own, pairs.base
    cells = [f"{kept:g}", f"`{match_page.named(own[0].method)}`", f"{pairs.mean('kl'):.3f}"]
    cells += [*match_page.needles(own, base), f"{pairs.mean('nbytes') / 1e6:.2f}"]
    return [*cells, f"{match_page.mean_ratio(own, base, 'operations'):.2f}×"]


def write(results: Sequence[CellResult], folder: Path = RESULTS, path: Path = PAGE) -> None:
    """Writes the page of `results`, their samples in `folder`, and other published records."""
    made = page(
        Published(results, paired.load(folder), long_page.load_distances(), match_page.load())
    )
    path.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    write(load_results([RESULTS / RECORDS]))
