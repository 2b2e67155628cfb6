# SPDX-License-Identifier: Apache-2.0
"""Parts of docs/results/README.md, and the first lines of README.md, from the records alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from docs.generate import needle_rows, real_picture
from docs.generate.made import RESULTS, and_list, table, with_part, with_parts
from docs.generate.needle_rows import CORE, core
from docs.generate.real_headline import MODEL, harder, summary
from kvfold.eval.run.cell import FULL
from kvfold.eval.run.cell_result import CellResult
from kvfold.eval.run.plan import Contender
from kvfold.evidence.grouped import grouped
from kvfold.report.board import Board, boards, haystacks, readable
from kvfold.report.headline import FIFTH
from kvfold.report.style import BASELINES
from kvfold.report.summary import ReportRow, rows

COMMAND = "docs/results/run.sh BOOK FOLDER\npython -m docs.generate.publish_real FOLDER"
WHEN = {False: "before the question is known", True: "with the question in view"}
BEST = 8  # methods of a table beside those of the picture
SHOWN = f"the best {BEST}, the next lower score, the picture's, the baselines ([all](report.md))."
DRAWN = "A point is the mean of noise and novel; its bar spans the two."
# Short names of tasks.
NAMES = {task: name for (task, _), name in CORE.items()} | {
    "ruler_niah_single_3": "UUIDs",
    "profile_form": "form",
    "profile_conversation": "conversation",
}
ON_GPU = (
    " Of samples read on a GPU no operations are counted: their means are over the others; scores "
    "[are the same](../performance.md#on-a-gpu)."
)
# The end of the part of README.md that is made, and its beginning.
BEGIN = "<!-- made by docs/generate/publish_real.py -->"


class Unit(NamedTuple):
    """A task at a length in tokens, None for a benchmark's own rows, under a protocol."""

    task: str
    length: int | None
    aware: bool

    @classmethod
    def of(cls, result: CellResult) -> Unit:
        cell = result.cell
        return cls(cell.task, cell.length, cell.protocol.question_aware)


class Planned(NamedTuple):
    """A unit that the leaderboard's command runs; `scored` is False for perplexities."""

    unit: Unit
    samples: int
    contenders: frozenset[Contender]  # methods at their budgets
    scored: bool = True


def page(results: Sequence[CellResult], planned: Sequence[Planned]) -> str:
    """docs/results/README.md; also of a part of the planned records, or of none.

    Its prose is written by hand.
    """
    command = f"```\n{COMMAND}\n```"
    told, records = ["Not run yet."], [command]
    if results:
        told = [*_results(results, planned)]
        records = ["\n".join(_limits(results)), command, _setup(results)]
    parts = {"results": told, "records": records}
    texts = {name: "\n\n".join(filter(None, each)) for name, each in parts.items()}
    return with_parts(RESULTS / "README.md", "real_page", texts)


def _results(results: Sequence[CellResult], planned: Sequence[Planned]) -> Iterator[str]:
    """The headline, how far the plan is done, and the tables of each protocol."""
    if claimed := summary(results):
        yield from (claimed, f"![score against bytes]({real_picture.FILE})", DRAWN, harder("../"))
    yield " ".join([_scope(results), *_progress(results, planned)])
    found = {board.question_aware: board for board in boards(core(results))}
    for aware, when in WHEN.items():
        yield f"## {when[0].upper()}{when[1:]}"
        yield from _board(found[aware]) if aware in found else ()
        yield from _other_tasks(readable(results), planned, aware)


def readme(text: str, results: Sequence[CellResult]) -> str:
    """README.md's `text` with the headline of `results` between its marks."""
    claimed = summary(results)
    more = "[All results](docs/results/README.md), with intervals and samples."
    parts = claimed, more, harder("docs/")
    return with_part(text, BEGIN, "\n\n".join(parts) if claimed else "")


def _board(board: Board) -> Iterator[str]:
    """Tables of a protocol: at a fifth of the cache, without a budget, and perplexities."""
    every = [row for row in board.overall() if row.score]
    whole = [row for row in every if row.complete]
    full = [row for row in whole if row.method == FULL]
    free = [row for row in whole if row.budget is None and row.method != FULL]
    where = f"Haystack: {haystacks(board.scored) or 'none'}."
    columns = {"method": needle_rows.name, **needle_rows.haystack_columns(board)}
    columns |= {"− full (95 %)": lambda row: needle_rows.gap(row.gap), "kept": needle_rows.kept}
    columns |= needle_rows.COSTS | {"n": needle_rows.samples_column(board)}
    if fifth := _picked([row for row in whole if row.kept_nominal == FIFTH]):
        yield f"### At a fifth of the cache, {board.when}"
        methods = sum(row.kept_nominal == FIFTH for row in whole)
        if methods > len(fifth):
            yield f"{len(fifth)} of {methods} methods: {SHOWN}"
        yield from (where, needle_rows.table([*full, *fifth], columns))
    if free:
        yield f"### Without a budget, {board.when}"
        free.sort(key=lambda row: row.bytes_ratio or 0)
        yield from (where, needle_rows.table([*full, *free], columns))
    if partial := len({row.method for row in every if not row.complete}):
        yield f"Methods run in one haystack only: {partial} ([tasks.md](tasks.md))."
    yield from _perplexities(board)


def _perplexities(board: Board) -> Iterator[str]:
    """One column for each text: perplexities of unlike texts have no mean."""
    texts = dict.fromkeys(tuple(one.cell.data) for one in board.perplexities)
    found: dict[str, dict[str, ReportRow]] = {}
    for data in texts:
        own = rows([one for one in board.perplexities if one.cell.data == data])
        shown = [row for row in own if row.method == FULL or row.kept_nominal == FIFTH]
        kept = sorted((row for row in shown if row.score), key=needle_rows.value)
        found[", ".join(data) or "perplexity"] = {row.method: row for row in kept}
    whole: dict[str, ReportRow] = {}  # of the first text that a method has read
    for of in found.values():
        whole = {**whole, **{name: row for name, row in of.items() if name not in whole}}
    columns: dict[str, needle_rows.Column] = {
        "method": needle_rows.name,
        **{text: _loss_in(of) for text, of in found.items()},
        "kept": needle_rows.kept,
        **{name: needle_rows.COSTS[name] for name in ("bytes", "prefill")},
    }
    if whole:
        counts = and_list(sorted({str(row.samples) for row in whole.values()}))
        yield f"### Perplexity at a fifth (lower is better), {board.when}"
        yield f"In each text, and the difference to full (95 %); {counts} samples of each."
        yield needle_rows.table(list(whole.values()), columns)


def _loss_in(found: dict[str, ReportRow]) -> needle_rows.Column:
    """The column of one text, whose rows are `found` by method."""

    def told(of: ReportRow) -> str:
        row = found.get(of.method)
        if row is None or row.score is None:
            return needle_rows.NONE
        value = f"{row.score.value:.1f}"
        return value if row.gap is None else f"{value}, {needle_rows.gap(row.gap)}"

    return told


def _picked(fifth: Sequence[ReportRow]) -> list[ReportRow]:
    """The best methods and the next that does worse, the picture's and the baselines; best first"""
    ranked = sorted(fifth, key=lambda row: (-needle_rows.value(row), row.bytes_ratio or 0))
    methods = [row for row in ranked if row.method not in BASELINES]
    worse = [row for row in methods if needle_rows.mean(row) != needle_rows.mean(methods[0])]
    shown = {row.method for row in [*methods[:BEST], *worse[:1]]}
    shown |= {*real_picture.LINES, *BASELINES}
    return [row for row in ranked if row.method in shown]


def _data(results: Sequence[CellResult]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.cell.data))


def _other_tasks(
    results: Sequence[CellResult], planned: Sequence[Planned], aware: bool
) -> Iterator[str]:
    """The picture's methods on tasks and lengths that not every method is run on."""
    scored = [one for one in results if not one.lower_is_better and Unit.of(one).aware == aware]
    asked = {one.unit: one.samples for one in planned if one.unit.aware == aware and one.scored}
    begun = {Unit.of(one) for one in scored if one.cell.method == FULL}
    own = [one for one in scored if not needle_rows.is_core(one) and Unit.of(one) in begun]
    if own:
        yield f"### Other tasks at a fifth, {WHEN[aware]}"
        where = f"Haystack: {haystacks(own) or 'none'}."
        yield f"{where} SimLayerKV and DBudgetKV choose their own size."
        yield _by_method(own, asked)
    if lacking := _named([unit for unit in asked if unit not in begun]):
        yield f"Not run yet {WHEN[aware]}: {lacking}."


def _named(units: Sequence[Unit]) -> str:
    """Tasks with their lengths, such as "noise (2048, 4096), novel (2048)"."""
    lengths = grouped(
        (NAMES.get(unit.task, unit.task), f"{unit.length or 'own rows'}") for unit in units
    )
    return ", ".join(f"{name} ({', '.join(own)})" for name, own in lengths.items())


def _by_method(own: Sequence[CellResult], asked: dict[Unit, int]) -> str:
    """A row for each method, a column for each task and length; the first row counts samples."""
    units = sorted(set(map(Unit.of, own)), key=lambda unit: (unit.task, unit.length or 0))
    fifth = {
        (one.cell.method, Unit.of(one)): one for one in own if one.kept_nominal in (FIFTH, None)
    }
    head = [f"{NAMES.get(unit.task, unit.task)}, {unit.length or 'own rows'}" for unit in units]
    counts = [(fifth[FULL, unit].samples, asked.get(unit, 0)) for unit in units]
    lines = [["samples", *(f"{n} of {of}" if n < of else f"{n}" for n, of in counts)]]
    for method in (FULL, *real_picture.LINES):
        line = real_picture.LINES.get(method)
        found = [fifth.get((method, unit)) for unit in units]
        scores = [f"{one.score.value:.1f}" if one and one.score else "–" for one in found]
        lines.append([line.name if line else "full cache", *scores])
    return table(["method", *head], lines, left=[0])


def _limits(results: Sequence[CellResult]) -> Iterator[str]:
    """Where answers are cut off, and how often the full cache's are."""
    full = [one for one in results if one.cell.method == FULL and not one.lower_is_better]
    named = ((one.cell.protocol.answer_tokens, _task(one)) for one in full)
    limits = grouped(dict.fromkeys((most, task) for most, task in named if most))
    if limits:
        told = [f"{most} tokens ({', '.join(tasks)})" for most, tasks in limits.items()]
        yield f"- Answers end at {and_list(told)}, finished or not."
    for one in full:
        if one.at_limit * 10 > one.questions and needle_rows.value(one) < 100:
            wrong = 100 - needle_rows.value(one)
            yield (
                f"- {_task(one)}: {one.at_limit} of the full cache's "
                f"{one.questions} answers go on to the limit, and {wrong:g} % are "
                "wrong. A method whose answers go on less often may score higher."
            )


def _task(result: CellResult) -> str:
    return NAMES.get(result.cell.task, result.cell.task)


def _scope(results: Sequence[CellResult]) -> str:
    """The model and texts that everything is measured on."""
    books = _data(results)
    texts = f"one book ({books[0]})" if len(books) == 1 else f"{len(books)} texts"
    second = "[what holds on a second one](two_models/README.md)"
    peer = "OpenVINO's evictions on the same needles: [a peer](openvino/README.md)."
    return f"All of it is one model of 135 million parameters and {texts}: {second}. {peer}"


def _progress(results: Sequence[CellResult], planned: Sequence[Planned]) -> Iterator[str]:
    """The part of the plan that is done, unless it is all."""
    counts = samples_of(results)
    done = sum(len(one.contenders) - len(lacking(one, counts)) for one in planned)
    total = sum(len(one.contenders) for one in planned)
    longest = max((one.cell.length or 0 for one in results), default=0)
    if done < total:
        yield f"Of the plan, {100 * done / total:.0f} % is done ({done} of {total} cells)."
    if any((one.unit.length or 0) > longest for one in planned):
        yield f"Longer than {longest} tokens: nothing yet."


def samples_of(results: Sequence[CellResult]) -> dict[tuple[Unit, Contender], int]:
    """Samples of each contender in each unit."""
    return {(Unit.of(one), (one.cell.method, one.cell.budget)): one.samples for one in results}


def lacking(planned: Planned, counts: Mapping[tuple[Unit, Contender], int]) -> set[Contender]:
    """Contenders of a unit that have fewer samples than planned."""
    unit, samples = planned.unit, planned.samples
    return {one for one in planned.contenders if counts.get((unit, one), 0) < samples}


def _setup(results: Sequence[CellResult]) -> str:
    """Model, texts, code and machines of the records, in one line."""
    subject = results[0].cell.subject
    commits = dict.fromkeys(commit or "unknown" for one in results for commit in one.commits)
    machines = dict.fromkeys(
        f"{setup.gpu or re.sub(r'[(]R[)]', '', setup.cpu)}, threads: {setup.threads}"
        for one in results
        for setup in one.setups
    )
    counted = ON_GPU if any(setup.gpu for one in results for setup in one.setups) else ""
    return (
        f"Records: {MODEL} in {subject.dtype}, attention `{subject.attention}`; text: "
        f"{', '.join(_data(results))}; commit {', '.join(commits)}; {'; '.join(machines)}."
        f"{counted}"
    )
