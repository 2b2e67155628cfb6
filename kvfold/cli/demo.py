# SPDX-License-Identifier: Apache-2.0
"""`kvfold demo`: methods compared on one document, by the bundled model or another."""

from __future__ import annotations

import shlex
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kvfold.cache.stats import OVER_BUDGET
from kvfold.cli.bench import words
from kvfold.cli.options import ModelOption, ModelPlace, model_of, read_text
from kvfold.errors import KvfoldError
from kvfold.evidence.outputs import check_apart, check_own
from kvfold.evidence.tables import seconds, size
from kvfold.loading import BUNDLED, Loading, check_name, load
from kvfold.terminal import console
from kvfold.writing import check_folder, check_place, write_text

if TYPE_CHECKING:
    from kvfold.cli.measure import DemoTrial, Requests, Steps
    from kvfold.contexts.context import Context

FULL = "full"
# `zap` reads a file that is fitted for a model: the bundled one brings its own.
FITTED = "zap"
METHODS = ("kvzip", FITTED, "compactor", "snapkv", "streaming_llm", "random")
# Documents with questions; and of one longer document, requests whose steps are timed.
DOCUMENTS, REQUESTS = 2, 8
# Tokens of a document and needles in it, and tokens of a request. The bundled model was trained to
# tell four needles apart; small chat models mix up more than a few.
LENGTH, NEEDLES, LONG = 1024, 4, 4096
OTHER_LENGTH, OTHER_NEEDLES = 1024, 3
HEAD = """\
                 right answers             {rows} requests of {long:,} tokens
method         in view  not known            memory    read           a step"""
READING = (
    "in view: the question stands below the text; it is read with it, and stays.",
    "not known: the text is compressed once and then asked, as one that many questions share.",
    "memory, read, a step: what the requests hold, the time to read one, and to write a token of "
    "each; with % and × those of the full cache.",
    "streaming_llm keeps the first tokens and the newest, random any.",
)
NOT_SHOWN = (
    "Not shown: texts without such needles; other models, which may order the methods otherwise; "
    "and a request alone, whose steps hardly get faster on a model as small as the bundled one."
)


@dataclass(frozen=True)
class DemoRow:
    """The outcome of one method at one budget: answers of all documents, and steps of requests."""

    method: str
    known: list[str]
    unknown: list[str]
    contexts: list[Context] = field(repr=False)
    steps: Steps


def command(
    page: Annotated[
        Path, typer.Option("--page", "-o", dir_okay=False, help="HTML page to write.")
    ] = Path("kvfold-demo.html"),
    place: ModelPlace = None,
    named: ModelOption = None,
    book: Annotated[
        Path | None,
        typer.Option(help="Text around the needles.", show_default="repeated sentences"),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of the documents.", show_default=str(LENGTH))
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first document.")] = 0,
    budgets: Annotated[str, typer.Option(help="Ratios to keep; the middle one is drawn.")] = "0.2",
) -> None:
    """Compare methods on one document: right answers, bytes and time."""
    started = time.perf_counter()
    out, model = console(), model_of(place, named)
    limits = _limits(budgets)
    _prepare(page)
    check_apart([page], [book], remedy="choose another --page")
    check_own(page, option="--page")
    haystack = None if book is None else read_text(book)
    check_name(model, Loading())
    with out.status("loading the model"):
        trials, long = _trials(model, tokens, seed, haystack)
    methods = [name for name in METHODS if name != FITTED or model == BUNDLED]
    _check(long, methods, limits)
    middle = limits[len(limits) // 2]
    opening = _introduction(trials)
    out.print(opening)
    shown: list[RenderableType] = []
    drawn: list[DemoRow] = []
    with out.status("the full cache") as status:
        full = long.requests(FULL, None, REQUESTS)
        for limit in limits:
            lines: list[RenderableType] = [
                Rule(f"kept: {limit} of the entries", align="left"),
                HEAD.format(rows=REQUESTS, long=long.tokens()),
            ]
            for line in lines:
                out.print(line)
            for method in (FULL, *methods):
                status.update(f"{method}: reads, answers, and decodes")
                row = _measure(trials, long, method, None if method == FULL else limit, full)
                lines.append(_line(trials, row))
                out.print(lines[-1])
                drawn += [row] if limit == middle else []
            shown += lines
    notes = _notes(trials, drawn, long)
    out.print(notes)
    _write(page, trials[0], [opening, Group(*shown), notes], drawn)
    out.print(Text(f"All of this and what each method kept: {page.resolve()}", overflow="fold"))
    out.print(f"{time.perf_counter() - started:.0f} seconds in all.")
    other = "MODEL" if model == BUNDLED else model
    used = shlex.join(["kvfold", "run", other, "--budget", middle, "--file", "TEXT"])
    out.print(Text(f"Next, a model and a text of your own: {used}"), soft_wrap=True)


def _limits(text: str) -> list[str]:
    """The budgets in `text`, split at spaces and commas; raises KvfoldError for a bad one."""
    from kvfold import Budget

    if not text.strip(" ,"):
        raise KvfoldError('no budgets: write for example --budgets "0.2 0.1"')
    limits = words(text)
    for limit in limits:
        Budget.of(limit)
    return limits


def _trials(
    model: str, tokens: int | None, seed: int, book: str | None
) -> tuple[list[DemoTrial], DemoTrial]:
    """Documents with questions, and the document of the requests whose steps are timed."""
    from kvfold.cli.measure import DemoTrial

    loaded = load(model)
    usual, needles = (LENGTH, NEEDLES) if model == BUNDLED else (OTHER_LENGTH, OTHER_NEEDLES)
    length = tokens or usual
    trials = [
        DemoTrial.of(*loaded, length, needles, seed + number, book) for number in range(DOCUMENTS)
    ]
    long = max(length, LONG) if model == BUNDLED else length
    return trials, DemoTrial.of(*loaded, long, needles, seed, book)


def _check(trial: DemoTrial, methods: Sequence[str], limits: Sequence[str]) -> None:
    """Raises KvfoldError now for methods and budgets that a cache would refuse later."""
    from kvfold import CompressedCache

    for method in methods:
        for limit in limits:
            CompressedCache(trial.model, method, limit, tokenizer=trial.tokenizer)


def _prepare(page: Path) -> None:
    """Creates the page's folder before the run; raises KvfoldError if it cannot."""
    if page.suffix.lower() not in (".html", ".htm"):
        raise KvfoldError(f"the page is HTML: name it {page.with_suffix('.html')}")
    check_folder(page.parent)
    page.parent.mkdir(parents=True, exist_ok=True)
    check_place(page)


def _introduction(trials: Sequence[DemoTrial]) -> Group:
    """Introduction: a document's opening, a needle and a question."""
    sample, needles = trials[0].sample, len(trials[0].needles())
    body, question = sample.document, sample.questions[0]
    at = body.index(question.answers[0])
    asked = sum(len(trial.sample.questions) for trial in trials)
    return Group(
        Rule("the documents", align="left"),
        f"{len(trials)} documents of {trials[0].tokens():,} tokens of filler, with {needles} "
        "needles in each: a number under a key of its own. "
        f"{asked} questions ask for one number each. The first document opens:",
        Text(textwrap.shorten(body, 240, placeholder=" ..."), style="dim"),
        "A needle:",
        Text(f"... {body[max(0, at - 110) : at + 40].strip()} ...", style="dim"),
        "A question:",
        Text(question.text, style="dim"),
    )


def _measure(
    trials: Sequence[DemoTrial], long: DemoTrial, method: str, limit: str | None, full: Requests
) -> DemoRow:
    """Answers of one method to all questions, and its steps beside those of `full`."""
    known = [answer for trial in trials for answer in trial.question_known(method, limit)]
    asked = [trial.question_unknown(method, limit) for trial in trials]
    unknown = [answer for _, answers in asked for answer in answers]
    steps = long.requests(method, limit, REQUESTS).beside(full)
    return DemoRow(method, known, unknown, [context for context, _ in asked], steps)


def _line(trials: Sequence[DemoTrial], row: DemoRow) -> str:
    known, unknown = (_share(trials, answers) for answers in (row.known, row.unknown))
    stats = row.steps.stats
    held = f"{size(stats.nbytes)} {stats.ratio:.0%}{'*' * stats.forced_over_budget}"
    reading, step = seconds(row.steps.reading), seconds(row.steps.seconds)
    return (
        f"{row.method:14} {known:>7} {unknown:>10} {held:>17} {reading:>7} "
        f"{step:>10} {row.steps.pace:.2f}×"
    )


def _right(trials: Sequence[DemoTrial], answers: Sequence[str]) -> list[bool]:
    """For each answer of all documents, True if it has the number asked for."""
    left: Iterator[str] = iter(answers)
    return [
        right
        for trial in trials
        for right in trial.right([next(left) for _ in trial.sample.questions])
    ]


def _share(trials: Sequence[DemoTrial], answers: Sequence[str]) -> str:
    right = _right(trials, answers)
    return f"{sum(right)} of {len(right)}"


def _notes(trials: Sequence[DemoTrial], rows: Sequence[DemoRow], long: DemoTrial) -> Group:
    """Lines below the table: how it is read, what it leaves out, and each method's answer."""
    questions = [question for trial in trials for question in trial.sample.questions]
    number = _answered(_right(trials, rows[0].unknown), _right(trials, rows[0].known))
    question = questions[number]
    answers = Table.grid(padding=(0, 2))
    for row in rows:
        answers.add_row(row.method, Text(row.unknown[number]))
    forced = any(row.steps.stats.forced_over_budget for row in rows)
    return Group(
        *READING,
        *([f"*: {OVER_BUDGET}"] if forced else []),
        NOT_SHOWN,
        Rule("one question, not yet known", align="left"),
        Text(f"{question.text} ({question.answers[0]})", style="dim"),
        answers,
    )


def _answered(*full: Sequence[bool]) -> int:
    """The first question that the full cache answers each time; the first if there is none."""
    each_time = zip(*full, strict=True)
    return next((number for number, right in enumerate(each_time) if all(right)), 0)


def _write(page: Path, trial: DemoTrial, parts: Sequence[Group], rows: Sequence[DemoRow]) -> None:
    from kvfold.cli.demo_page import page as whole
    from kvfold.inspect.kept import kept_figure

    first = {row.method: row.contexts[0] for row in rows}
    kept = {
        name: [each.cache.positions(layer) for layer in range(len(each.cache.compressed_layers))]
        for name, each in first.items()
        if name != FULL
    }
    picture = kept_figure(kept, first[FULL].stats().seen, trial.needles())
    write_text(page, whole(parts, picture))
