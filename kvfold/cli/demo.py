# SPDX-License-Identifier: Apache-2.0
"""`kvfold demo`: methods compared on one document, by the bundled model or another."""

from __future__ import annotations

import shlex
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kvfold.cache.stats import OVER_BUDGET
from kvfold.cli.bench import words
from kvfold.cli.console import progress
from kvfold.cli.options import ModelOption, ModelPlace, model_of, read_text
from kvfold.errors import KvfoldError
from kvfold.evidence.outputs import check_apart, check_own
from kvfold.evidence.tables import size, table
from kvfold.loading import BUNDLED, Loading, check_name, load
from kvfold.terminal import console
from kvfold.writing import check_folder, check_place, write_text

if TYPE_CHECKING:
    from kvfold.cli.measure import DemoResult, DemoTrial

ANY_QUESTION = "kvzip"
AWARE = ("streaming_llm_original", "h2o", "snapkv", "pyramidkv", "knorm", "tova", "random")
METHODS = (ANY_QUESTION, *AWARE)
SHOWN = ("full", "snapkv", "random")
# Tokens of the document and needles in it. The bundled model was trained to tell needles apart, and
# half of its trained length is read in no time; small chat models mix up more than a few.
LENGTH, NEEDLES = 2304, 6
OTHER_LENGTH, OTHER_NEEDLES = 1024, 3
KNOWN = (
    "With the question in the prompt, a method compresses once for each question and keeps the "
    "entries that the question attends to."
)
WHY = (
    "A document that many questions share is compressed before any of them is known. SnapKV, "
    "PyramidKV and TOVA score entries by the document's last queries, which do not show the key of "
    "a later question. KVzip lets the model repeat the document, and keeps the entries that it "
    "attends to meanwhile."
)

# Results by (method, budget); and answers by method, compressed with the question in view.
Unknown = dict[tuple[str, str | None], "DemoResult"]
Known = dict[str, list[str]]


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
        int | None,
        typer.Option(
            min=1,
            help="Length of the document.",
            show_default=f"{LENGTH}; {OTHER_LENGTH} with --model",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the document.")] = 0,
    budgets: Annotated[
        str, typer.Option(help="Ratios to keep; the middle one is drawn.")
    ] = "0.5 0.2 0.1",
) -> None:
    """Compare methods on one document: right answers, bytes and time."""
    started = time.perf_counter()
    out, model = console(), model_of(place, named)
    with out.status("importing torch and transformers"):
        from kvfold.cli.measure import DemoTrial
    limits = _limits(budgets)
    _prepare(page)
    check_apart([page], [book], remedy="choose another --page")
    check_own(page, option="--page")
    haystack = None if book is None else read_text(book)
    check_name(model, Loading())
    usual = (LENGTH, NEEDLES) if model == BUNDLED else (OTHER_LENGTH, OTHER_NEEDLES)
    trial = DemoTrial.of(*load(model), tokens or usual[0], usual[1], seed, haystack)
    _check(trial, limits)
    middle = limits[len(limits) // 2]
    opening = _introduction(trial)
    out.print(opening)
    unknown, known = _measure(out, trial, limits, middle)
    found = Group(
        Rule("the question is known", align="left"),
        f"{KNOWN}\n",
        _comparison(trial, known, middle),
        Rule("the question is not known yet", align="left"),
        f"{WHY}\n",
        _costs(trial, unknown),
        _example(trial, unknown, known, middle),
    )
    out.print(found)
    _write(page, trial, [opening, found], unknown, middle)
    out.print(Text(f"All of this and what each method kept: {page.resolve()}", overflow="fold"))
    out.print(f"{time.perf_counter() - started:.0f} seconds in all.")
    other = "MODEL" if model == BUNDLED else model
    used = shlex.join(["kvfold", "run", other, "--budget", middle, "--file", "TEXT"])
    out.print(Text(f"Next, a model and a text of your own: {used}"), soft_wrap=True)


def _limits(text: str) -> list[str]:
    """The budgets in `text`, split at spaces and commas; raises KvfoldError for a bad one."""
    from kvfold import Budget

    if not text.strip(" ,"):
        raise KvfoldError('no budgets: write for example --budgets "0.5 0.2 0.1"')
    limits = words(text)
    for limit in limits:
        Budget.of(limit)
    return limits


def _check(trial: DemoTrial, limits: list[str]) -> None:
    """Raises KvfoldError now for methods and budgets that a cache would refuse later."""
    from kvfold import CompressedCache

    for method in METHODS:
        for limit in limits:
            CompressedCache(trial.model, method, limit, tokenizer=trial.tokenizer)


def _prepare(page: Path) -> None:
    """Creates the page's folder before the run; raises KvfoldError if it cannot."""
    if page.suffix.lower() not in (".html", ".htm"):
        raise KvfoldError(f"the page is HTML: name it {page.with_suffix('.html')}")
    check_folder(page.parent)
    page.parent.mkdir(parents=True, exist_ok=True)
    check_place(page)


def _introduction(trial: DemoTrial) -> Group:
    """Introduction: the document's opening, a needle and a question."""
    sample, spans = trial.sample, trial.needles()
    body = sample.document
    question = sample.questions[0]
    at = body.index(question.answers[0])
    return Group(
        Rule("the document", align="left"),
        f"{trial.tokens():,} tokens of filler with {len(spans)} needles in it, each a number under "
        f"a key of its own; {len(sample.questions)} questions ask for one number each. It opens:",
        Text(textwrap.shorten(body, 240, placeholder=" ..."), style="dim"),
        "A needle:",
        Text(f"... {body[max(0, at - 110) : at + 40].strip()} ...", style="dim"),
        "A question:",
        Text(question.text, style="dim"),
    )


def _measure(
    out: Console, trial: DemoTrial, limits: list[str], middle: str
) -> tuple[Unknown, Known]:
    """Results of all methods at all budgets, measured with a progress bar."""
    runs = [("full", None), *((method, limit) for limit in limits for method in METHODS)]
    questions = len(trial.sample.questions)
    unknown: Unknown = {}
    known: Known = {}
    with progress(out) as bar:
        task = bar.add_task("reading the document", total=len(runs) + len(AWARE) + 1)
        full = trial.compress("full", None)
        for method, limit in runs:
            bar.update(task, description=f"{_named(method, limit)}: {questions} questions")
            unknown[method, limit] = trial.question_unknown(method, limit, full)
            bar.advance(task)
        for method in ("full", *AWARE):
            bar.update(task, description=f"{method}: the question known")
            known[method] = trial.question_known(method, None if method == "full" else middle)
            bar.advance(task)
    return unknown, known


def _named(method: str, limit: str | None) -> str:
    return method if limit is None else f"{method} {limit}"


def _costs(trial: DemoTrial, unknown: Unknown) -> Table:
    numbers = ("kept", "bytes", "of full", "answers right", "time per token")
    shown = table("question unknown while compressing", "method", *numbers, right=numbers)
    shown.caption = (
        "bytes: all that a cache holds, with room for coming tokens; of full: over transformers' "
        "own cache; time per token: over the full cache's, steps in turn, full against itself"
    )
    if any(result.stats.forced_over_budget for result in unknown.values()):
        shown.caption += f"; *: {OVER_BUDGET}"
    previous: str | None = None
    for (method, limit), result in unknown.items():
        if limit != previous:
            shown.add_section()
            previous = limit
        shown.add_row(
            method,
            f"{result.stats.kept_fraction:.1%}{'*' * result.stats.forced_over_budget}",
            size(result.stats.nbytes),
            f"{result.stats.ratio:.1%}",
            _share(trial, result.answers),
            f"{result.pace:.2f}x",
        )
    return shown


def _comparison(trial: DemoTrial, known: Known, middle: str) -> Table:
    title = f"question known while compressing, budget {middle}"
    shown = table(title, "method", "answers right", right=["answers right"])
    for method, answers in known.items():
        shown.add_row(method, _share(trial, answers))
    return shown


def _example(trial: DemoTrial, unknown: Unknown, known: Known, middle: str) -> Group:
    number = _answered(trial, unknown["full", None].answers, known["full"])
    question = trial.sample.questions[number]
    shown = table(f"one question, budget {middle}", "method", "question", "answer", "right")
    for method in SHOWN:
        result = unknown[method, None if method == "full" else middle]
        for when, answers in (("unknown", result.answers), ("known", known[method])):
            right = "yes" if trial.right(answers)[number] else "no"
            shown.add_row(method, when, Text(answers[number]), right)
    asked = f"{question.text} ({question.answers[0]})"
    note = "With the question known, the answer's opening words are part of the prompt."
    return Group(Text(asked, style="dim"), shown, Text(note))


def _answered(trial: DemoTrial, *full: Sequence[str]) -> int:
    """The first question that the full cache answers each time; the first if there is none."""
    each_time = zip(*map(trial.right, full), strict=True)
    return next((number for number, right in enumerate(each_time) if all(right)), 0)


def _share(trial: DemoTrial, answers: list[str]) -> str:
    return f"{sum(trial.right(answers))}/{len(answers)}"


def _write(
    page: Path, trial: DemoTrial, parts: Sequence[Group], unknown: Unknown, middle: str
) -> None:
    from kvfold.cli.demo_page import page as whole
    from kvfold.inspect.kept import kept_figure

    kept = {method: unknown[method, middle].positions for method in METHODS}
    picture = kept_figure(kept, unknown["full", None].stats.seen, trial.needles())
    write_text(page, whole(parts, picture))
