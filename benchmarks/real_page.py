# SPDX-License-Identifier: Apache-2.0
"""docs/results/README.md and the first lines of README.md, made from the records alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import real_picture
from made_parts import with_part

from kvfold.eval.run.cell import FULL
from kvfold.eval.run.cell_result import CellResult
from kvfold.eval.run.plan import Contender
from kvfold.methods.description import shortest
from kvfold.report.board import Board, boards, haystacks, sources
from kvfold.report.headline import FIFTH, headline
from kvfold.report.names import readable
from kvfold.report.style import BASELINES
from kvfold.report.summary import ReportRow, rows
from kvfold.report.tables import COLUMNS, cells

MODEL = "SmolLM2-135M-Instruct"
COMMAND = "benchmarks/real_leaderboard.sh BOOK FOLDER\npython benchmarks/publish_real.py FOLDER"
WHEN = {False: "before the question is known", True: "with the question in view"}
PERCENT = "\u00a0%"  # never on another line than its number
BEST = 8  # methods of a table beside those of the picture
SHOWN = (
    "method", "budget", "score", "− full (95 %)", "kept", "bytes", "operations", "length",
    "samples",
)  # fmt: skip
READING = """\
- **Before the question is known**, the context is compressed first and answers every question
  from what is left. **With the question in view**, the two are compressed together, once for
  each question.
- **score** is in percent with its 95 % interval; **− full** the difference to the full cache on
  the same samples, ≈ if its interval holds zero; **kept** the entries asked for and those
  measured, and **bytes** theirs, over the full cache's. With the question in view the two are
  measured after the answer and grow with it. **operations** are of a prefill with its compression
  and of a token of the answer, and **length** is the answers' in tokens, over the full cache's.
- A mean is over the two needles at 1024 tokens, which every method is run on; the other tasks
  stand task by task.
  [Evaluation](../evaluation.md) has the rest.
- **Baselines**: `cut` is a full cache on a shortened context, `random` evicts at random,
  `streaming_llm` keeps sinks and the newest tokens.
- **`kvzip`** keeps the opening of the chat template beside its budget.
- **The haystack** is the text in which a needle is hidden: RULER's noise ("The grass is green.
  …"), or a book."""
LINKS = """\
- [index.html](index.html): all methods and budgets, to sort and filter. [report.md](report.md)
  has the tables, [tasks.md](tasks.md) one for each task.
- [records.jsonl](records.jsonl), and `samples.csv.gz`: every answer's score and its first
  characters. `python benchmarks/paired.py docs/results kvzip@0.2 snapkv@0.2` compares two
  methods."""
OTHERS = """\
- [Claims of five papers](../claims.md), tested on the same model.
- [Merging](merging.md) of evicted entries on the same model.
- [The bundled model](bundled/README.md), made for tests, and [its
  oddities](bundled/oddities.md)."""
# The end of the part of README.md that is made, and its beginning.
BEGIN = "<!-- made by benchmarks/publish_real.py -->"


# Tasks and length that all methods and budgets are run on: their means are the picture.
CORE = {("ruler_niah_single_1", 1024), ("ruler_niah_single_2", 1024)}


class Unit(NamedTuple):
    """A task at a length in tokens, None for a benchmark's own rows, under a protocol."""

    task: str
    length: int | None
    aware: bool


class Planned(NamedTuple):
    """A unit that the leaderboard's command runs; `scored` is False for perplexities."""

    unit: Unit
    samples: int
    contenders: frozenset[Contender]  # methods at their budgets
    scored: bool = True


def core(results: Sequence[CellResult]) -> list[CellResult]:
    """Records that means are made of: of the needles that every method is run on, and losses."""
    return [
        one for one in results if one.lower_is_better or (one.cell.task, one.cell.length) in CORE
    ]


def page(results: Sequence[CellResult], planned: Sequence[Planned]) -> str:
    """docs/results/README.md; also of a part of the planned records, or of none."""
    parts = [f"# Results of a really trained model, {MODEL}"]
    command = f"```\n{COMMAND}\n```"
    if not results:
        return "\n\n".join([*parts, "Not run yet:", command, OTHERS]) + "\n"
    if claimed := summary(results):
        parts += [claimed, f"![score against bytes]({real_picture.FILE})"]
    parts += _progress(results, planned)
    found = {board.question_aware: board for board in boards(core(results))}
    for aware, when in WHEN.items():
        parts.append(f"## {when[0].upper()}{when[1:]}")
        parts += _board(found[aware]) if aware in found else []
        parts += _by_task(readable(results), planned, aware)
    parts += ["## How to read it", READING, command, _setup(results)]
    parts += ["## More", f"{LINKS}\n{OTHERS}"]
    return "\n\n".join(part for part in parts if part) + "\n"


def readme(text: str, results: Sequence[CellResult]) -> str:
    """README.md's `text` with the headline and the picture of `results` between its marks."""
    claimed = summary(results)
    picture = f"![Score against bytes of {MODEL}, two protocols](docs/results/{real_picture.FILE})"
    more = "[All results](docs/results/README.md), with the texts, intervals and samples."
    made = f"\n{claimed}\n\n{picture}\n\n{more}\n" if claimed else ""
    return with_part(text, BEGIN, made)


def summary(results: Sequence[CellResult]) -> str:
    """Answers from a fifth of the cache, for each protocol; empty without such records."""
    claims = [f"- {claim}" for board in boards(core(results)) for claim in _claim(board)]
    return (
        "\n".join([f"On {MODEL}, at a budget of a fifth of the entries:", "", *claims])
        if claims
        else ""
    )


def _claim(board: Board) -> Iterator[str]:
    """The best of the picture's methods at a fifth, and the next, beside the full cache."""
    every = [row for row in board.overall() if row.complete and row.score]
    full = next((row for row in every if row.method == FULL), None)
    fifth = [row for row in every if row.kept_nominal == FIFTH and row.method in real_picture.LINES]
    if full is None or not fifth:
        return
    fifth.sort(key=lambda row: (-round(_score(row)), row.bytes_ratio or 0))
    best = [row for row in fifth if _percent(row) == _percent(fifth[0])]
    others = fifth[len(best) :]
    parts = [f"{100 * (row.bytes_ratio or 0):.0f}{PERCENT}" for row in best]
    names = [f"{_name(row)} ({part}" for row, part in zip(best, parts, strict=True)]
    names[0] += " of the bytes"
    verb, unit = _asked(board)
    claims = [
        f"{and_list([f'{name})' for name in names])} {verb if best[1:] else f'{verb}s'} "
        f"**{_percent(best[0])}**{unit}"
    ]
    if others:
        claims.append(f"the next best in the picture, {_name(others[0])}, {_percent(others[0])}")
    claims.append(f"the full cache {_percent(full)}")
    yield (
        f"**{board.when[0].upper()}{board.when[1:]}**, {'; '.join(claims)} "
        f"({full.samples} samples of {_counted(board, full)})."
    )


def and_list(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _asked(board: Board) -> tuple[str, str]:
    """Verb and object of a score: of needles, of right answers, or of a mean of several metrics."""
    lengths = sorted({result.cell.length for result in board.scored if result.cell.length})
    if lengths and {result.group for result in board.scored} == {"single needle"}:
        return "find", f" of the needles in {and_list([*map(str, lengths)])} tokens"
    found = all((result.metric or "").startswith("string_match") for result in board.scored)
    return ("answer", " of what is asked") if found else ("score", "")


def _counted(board: Board, row: ReportRow) -> str:
    alike = len({result.cell.length for result in board.scored}) == 1
    several = "tasks" if alike else "tasks and lengths"
    return "one task" if row.units == 1 else f"{row.units} {several}"


def _score(row: ReportRow) -> float:
    assert row.score
    return row.score.value


def _percent(row: ReportRow) -> str:
    return f"{_score(row):.0f}{PERCENT}"


def _name(row: ReportRow) -> str:
    line = real_picture.LINES.get(row.method)
    return line.name if line else f"`{shortest(row.method)}`"


def _board(board: Board) -> Iterator[str]:
    """Tables of a protocol: at a fifth of the cache, without a budget, and perplexities."""
    every = [row for row in board.overall() if row.score]
    whole = [row for row in every if row.complete]
    full = [row for row in whole if row.method == FULL]
    free = [row for row in whole if row.budget is None and row.method != FULL]
    where = f"Haystack: {haystacks(board.scored) or 'none'}."
    yield " ".join(headline(board.overall(), board.when).further)
    if fifth := _picked([row for row in whole if row.kept_nominal == FIFTH]):
        yield f"### At a fifth of the cache, {board.when}"
        yield from (where, table([*full, *fifth]))
    if free:
        yield f"### Without a budget, {board.when}"
        yield from (where, table([*full, *sorted(free, key=lambda row: row.bytes_ratio or 0)]))
    lost = [row for row in rows(board.perplexities) if row.score]
    shown = [row for row in lost if row.method == FULL or row.kept_nominal == FIFTH]
    if shown:
        yield f"### Perplexity at a fifth (lower is better), {board.when}"
        yield f"Text: {sources(board.perplexities)}."
        yield table(sorted(shown, key=_score))
    partial = dict.fromkeys(f"`{shortest(row.method)}`" for row in every if not row.complete)
    if partial:
        yield f"Not on every task, and so in no mean: {', '.join(partial)}."


def _picked(fifth: Sequence[ReportRow]) -> list[ReportRow]:
    """The best methods, those of the picture, and the baselines, best first."""
    ranked = sorted(fifth, key=lambda row: -_score(row))
    best = [row for row in ranked if row.method not in BASELINES][:BEST]
    known = {*real_picture.LINES, *BASELINES}
    return [row for row in ranked if row in best or row.method in known]


def table(shown: Sequence[ReportRow], columns: Sequence[str] = SHOWN) -> str:
    """A Markdown table of these columns."""
    picked = [COLUMNS.index(name) for name in columns]
    lines = [tuple(columns), ("---", "---", *["---:"] * (len(columns) - 2))]
    lines += [tuple(cells(row)[column] for column in picked) for row in shown]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _data(results: Sequence[CellResult]) -> list[str]:
    return list(dict.fromkeys(name for result in results for name in result.cell.data))


def _by_task(
    results: Sequence[CellResult], planned: Sequence[Planned], aware: bool
) -> Iterator[str]:
    """A table of tasks and lengths: the picture's methods at a fifth, or without a budget."""
    found = [Unit(one.cell.task, one.cell.length, aware) for one in results if _is_in(one, aware)]
    asked = {one.unit: one.samples for one in planned if one.unit.aware == aware and one.scored}
    units = dict.fromkeys(found, 0) | asked
    names = [line.name for line in real_picture.LINES.values()]
    lines = [["task", "tokens", "haystack", "n", "full cache", *names]]
    lines.append(["---", "---:", "---", "---:", *["---:"] * (len(names) + 1)])
    for unit, count in units.items():
        own = [one for one in results if _is_in(one, aware) and _is_of(one, unit)]
        lines.append([f"`{unit.task}`", str(unit.length or "–"), *_scores(own, count)])
    if units:
        yield f"### Task by task, {WHEN[aware]}"
        yield "Scores at a fifth of the cache; SimLayerKV and DBudgetKV choose their own size."
        yield "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _is_in(result: CellResult, aware: bool) -> bool:
    """True for a score under the protocol."""
    return not result.lower_is_better and result.cell.protocol.question_aware == aware


def _is_of(result: CellResult, unit: Unit) -> bool:
    cell = result.cell
    return unit == Unit(cell.task, cell.length, cell.protocol.question_aware)


def _scores(own: Sequence[CellResult], asked: int) -> list[str]:
    """Cells of a row: haystack, samples, the full cache's score, and those of the methods."""
    full = next((one for one in own if one.cell.method == FULL), None)
    if full is None:
        return ["", "not run yet", *[""] * (len(real_picture.LINES) + 1)]
    fifth = {one.cell.method: one for one in own if one.kept_nominal in (FIFTH, None)}
    shown = [fifth.get(method) for method in (FULL, *real_picture.LINES)]
    count = str(full.samples) if full.samples >= asked else f"{full.samples} of {asked}"
    scores = [
        "–" if one is None or one.score is None else f"{one.score.value:.1f}" for one in shown
    ]
    return [full.haystack or "none", count, *scores]


def _progress(results: Sequence[CellResult], planned: Sequence[Planned]) -> Iterator[str]:
    """The part of the plan that is done, unless it is all."""
    samples: dict[Unit, dict[Contender, int]] = defaultdict(dict)
    for one in results:
        unit = Unit(one.cell.task, one.cell.length, one.cell.protocol.question_aware)
        samples[unit][one.cell.method, one.cell.budget] = one.samples
    done = sum(
        samples[one.unit].get(contender, 0) >= one.samples
        for one in planned
        for contender in one.contenders
    )
    total = sum(len(one.contenders) for one in planned)
    if done < total:
        yield (
            f"**Not complete**: {done} of {total} planned cells are done, each a method at a "
            "budget on one task, at one length, under one protocol. The tables task by task say "
            "which tasks lack."
        )


def _setup(results: Sequence[CellResult]) -> str:
    """Model, texts, code and machine of the records, in one line."""
    subject = results[0].cell.subject
    commits = dict.fromkeys(commit or "unknown" for one in results for commit in one.commits)
    machines = dict.fromkeys(
        f"{setup.gpu or re.sub(r'[(]R[)]', '', setup.cpu)}, threads: {setup.threads}"
        for one in results
        for setup in one.setups
    )
    return (
        f"Records: {MODEL} in {subject.dtype}, attention `{subject.attention}`; text: "
        f"{', '.join(_data(results))}; commit {', '.join(commits)}; {'; '.join(machines)}."
    )
