# SPDX-License-Identifier: Apache-2.0
"""Boards: the comparable results, those of one model under one protocol, by group and task."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvfold.eval.run.cell import EvalCell, EvaluatedModel
from kvfold.eval.run.cell_result import CellResult
from kvfold.evidence.grouped import grouped
from kvfold.methods.description import without_files
from kvfold.report.summary import ReportRow, rows

Kind = Literal["overall", "group", "task"]
OVERALL = "all tasks"


class BoardView(NamedTuple):
    """Rows over all tasks, one group or one task, at one `length` or (None) over all lengths.

    `haystack` names the texts that needles were hidden in, as `haystacks` does.
    """

    kind: Kind
    name: str
    length: int | None
    rows: list[ReportRow]
    haystack: str


@dataclass(frozen=True)
class Board:
    """Results of one model under one protocol; perplexities are never averaged with scores.

    `settings` are those that tell its runs from others of the same tasks, such as "seed 1".
    """

    subject: EvaluatedModel
    question_aware: bool
    history: str
    results: tuple[CellResult, ...]
    settings: str = ""

    @property
    def protocol(self) -> str:
        """The protocol in words."""
        asked = "question-aware" if self.question_aware else "question-agnostic"
        history = "" if self.history == "own" else "right answers as history"
        return ", ".join(filter(None, (asked, history, self.settings)))

    @property
    def when(self) -> str:
        """The methods' knowledge of the question, in words."""
        return (
            "with the question in view" if self.question_aware else "before the question is known"
        )

    @property
    def scored(self) -> list[CellResult]:
        """Results of tasks with a metric, including cells that only have errors."""
        return [r for r in self.results if r.metric is not None and not r.lower_is_better]

    @property
    def perplexities(self) -> list[CellResult]:
        """Results of tasks whose score is a perplexity."""
        return [r for r in self.results if r.lower_is_better]

    @property
    def texts(self) -> dict[str, list[CellResult]]:
        """`perplexities_by_text` of its results."""
        return perplexities_by_text(self.results)

    @property
    def groups(self) -> dict[str, list[str]]:
        """Task names by group."""
        tasks = dict.fromkeys((result.group, result.cell.task) for result in self.scored)
        return grouped(tasks)

    def lengths(self, results: Sequence[CellResult]) -> list[int]:
        """Prompt lengths in tokens of generated samples, ascending."""
        return sorted({r.cell.length for r in results if r.cell.length is not None})

    def overall(self) -> list[ReportRow]:
        """Rows over all tasks."""
        return rows(self.scored)

    def views(self) -> list[BoardView]:
        """Views of all tasks, each group and each task; at all lengths, and at each if several."""
        members: list[tuple[Kind, str, list[CellResult]]] = [("overall", OVERALL, self.scored)]
        for group, tasks in self.groups.items():
            members.append(("group", group, [r for r in self.scored if r.group == group]))
            members += [("task", t, [r for r in self.scored if r.cell.task == t]) for t in tasks]
        found = []
        for kind, name, own in members:
            found.append(BoardView(kind, name, None, rows(own), haystacks(own)))
            lengths = self.lengths(self.scored)
            for length in lengths if len(lengths) > 1 else []:
                at = [r for r in own if r.cell.length == length]
                found += [BoardView(kind, name, length, rows(at), haystacks(at))] if at else []
        return found


def perplexities_by_text(results: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """Perplexities by text and task, as "book.txt (perplexity)": those of texts have no mean."""
    losses = [result for result in results if result.lower_is_better]
    return grouped((sources([result]) or result.cell.task, result) for result in losses)


def haystacks(results: Sequence[CellResult]) -> str:
    """Haystacks and their tasks, such as "noise (single_1); book.txt (single_2)"; may be empty."""
    return _with_tasks((r.haystack, r.cell.task) for r in results if r.haystack is not None)


def sources(results: Sequence[CellResult]) -> str:
    """Data that samples were made of and their tasks, such as "book.txt (perplexity)"."""
    used = ((dict.fromkeys(result.cell.data), result.cell.task) for result in results)
    return _with_tasks((", ".join(names), task) for names, task in used if names)


def _with_tasks(named: Iterable[tuple[str, str]]) -> str:
    """Each name once, with its tasks in brackets."""
    found = grouped(dict.fromkeys(named))
    return "; ".join(f"{name} ({', '.join(tasks)})" for name, tasks in found.items())


def boards(results: Sequence[CellResult]) -> list[Board]:
    """One board per model and protocol, agnostic ones first; methods have `readable` names.

    Runs of the same cells at another seed, prompt limit or answer length have boards of their own.
    """
    found = grouped(
        ((each.cell.subject, each.cell.protocol.question_aware, each.cell.protocol.history), each)
        for each in readable(results)
    )
    made = [
        Board(*key, results=tuple(members), settings=settings)
        for key, group in found.items()
        for settings, members in _by_settings(group).items()
    ]
    return sorted(made, key=lambda board: board.question_aware)


def _by_settings(results: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """Results by the settings in which they differ; all together where no cell stands twice."""
    cells = [result.cell for result in results]
    named = [(one.task, one.length, one.data, one.method, one.budget) for one in cells]
    if len(set(named)) == len(named):
        return {"": list(results)}
    settings = [_settings(cell) for cell in cells]
    alike = set(settings[0]).intersection(*settings)
    differing = (", ".join(one for one in own if one not in alike) for own in settings)
    return grouped(zip(differing, results, strict=True))


def _settings(cell: EvalCell) -> tuple[str, str, str]:
    """Settings of a run that give other results of the same task."""
    limit, tokens = cell.protocol.max_length, cell.protocol.answer_tokens
    answers = "the tasks' own answer lengths" if tokens is None else f"answers of {tokens} tokens"
    return f"seed {cell.seed}", f"prompts within {limit:,} tokens", answers


def titles(all_boards: Sequence[Board]) -> list[str]:
    """A unique title per board: its protocol, after its model if there are several models."""
    models = list(dict.fromkeys(board.subject for board in all_boards))
    names = [model.name for model in models]

    def title(board: Board) -> str:
        model = board.subject.name
        if names.count(model) > 1:
            model = f"{model} ({models.index(board.subject) + 1})"
        return f"{model}, {board.protocol}" if len(models) > 1 else board.protocol

    return [title(board) for board in all_boards]


def slugs(names: Sequence[str]) -> list[str]:
    """A unique file name part per name, of lower-case letters, digits and hyphens."""
    made = [re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in names]
    return [
        one if one and made.count(one) == 1 else f"{one}-{number}".strip("-")
        for number, one in enumerate(made, 1)
    ]


def readable(results: Sequence[CellResult]) -> list[CellResult]:
    """The results, their methods by the shortest names that tell methods and files apart.

    `zap:file=a.safetensors` is `zap` beside no other zap, and gets its file's digest beside
    results of another file of that name.
    """
    subjects = dict.fromkeys((result.cell.method, result.cell.files) for result in results)
    short = Counter(without_files(method) for method, _ in subjects)
    texts = Counter(method for method, _ in subjects)

    def name(cell: EvalCell) -> str:
        if short[without_files(cell.method)] == 1:
            return without_files(cell.method)
        known = texts[cell.method] == 1 or not cell.files
        return cell.method if known else f"{cell.method} ({', '.join(cell.files)})"

    named = [result.cell.model_copy(update={"method": name(result.cell)}) for result in results]
    return [
        result.model_copy(update={"cell": cell})
        for result, cell in zip(results, named, strict=True)
    ]
