# SPDX-License-Identifier: Apache-2.0
"""Evaluation from Python: the runs of `kvfold eval`, with a model that is loaded already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.budget import Budget
from kvfold.errors import KvfoldError
from kvfold.eval.run import session
from kvfold.eval.run.cell import Protocol, Subject
from kvfold.eval.run.dataframe import flat
from kvfold.eval.run.job import work
from kvfold.eval.run.plan import Plan, Wanted, contenders
from kvfold.eval.run.result import Result
from kvfold.eval.tasks import NoData, Request, Task, Unreadable, families, select
from kvfold.hf.chat_template import token_count
from kvfold.jobs.executor import here
from kvfold.methods.base import Method

# A quarter of what a model reads is half of what KVzip can repeat; papers report 4096.
SHARE, USUAL = 4, 4096

# Rows that cannot be read of which each is named.
ROWS = 10

Said = Callable[[str], None]


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: str | Sequence[str],
    methods: str | Method | Sequence[str | Method],
    budgets: Budget | float | str | Sequence[Budget | float | str] = (),
    *,
    data: str | Path | None = None,
    samples: int | None = None,
    lengths: int | Sequence[int] | None = None,
    haystack: str | Path | None = None,
    question_aware: bool = False,
    max_length: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Tasks × methods × budgets, beside the full cache and the baselines, one record for each cell.

    Returns plain dictionaries with the columns of `records.csv`: `pandas.DataFrame(records)` is a
    table of them. Options are named as those of `kvfold eval`, which has more. With `out` samples
    and records are kept in that folder, where a run that was stopped goes on and `kvfold report`
    finds them. Raises KvfoldError for unknown names, for data that cannot be read, and where no
    sample has an answer.
    """
    competing = contenders([str(one) for one in _listed(methods)], _listed(budgets))
    readable = max_length or readable_tokens(model)
    request = Request(
        samples=samples,
        seed=seed,
        count=partial(token_count, tokenizer),
        data=None if data is None else str(data),
        haystack=None if haystack is None else Path(haystack),
    )
    sizes = [usual_length(readable)] if lengths is None else _listed(lengths)
    name = getattr(model.config, "name_or_path", "") or type(model).__name__
    plan = Plan(
        wanted=tuple(drawn(_listed(tasks), request, sizes)),
        subject=Subject.of(name, model, tokenizer),
        protocol=Protocol(question_aware=question_aware, max_length=readable),
        contenders=tuple(competing),
    )
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        return _run(plan, model, tokenizer, Path(out))
    with TemporaryDirectory() as folder:
        return _run(plan, model, tokenizer, Path(folder))


def readable_tokens(model: PreTrainedModel) -> int:
    """What the model was trained to read, or what papers report."""
    return int(getattr(model.config, "max_position_embeddings", USUAL))


def usual_length(readable: int) -> int:
    """Tokens of a generated sample where none are asked for: a power of two."""
    return int(min(USUAL, 2 ** (readable // SHARE).bit_length() // 2))


def drawn(
    names: Sequence[str], request: Request, lengths: Sequence[int], say: Said = lambda text: None
) -> Iterator[Wanted]:
    """The samples of all tasks; of a benchmark's name those that can be drawn.

    `say` is told what is left out, and which rows cannot be read. Raises KvfoldError for a task
    that was named itself and cannot be drawn, and where none can.
    """
    found = False
    able, reasons = with_data(names, request)
    for reason in reasons:
        say(f"left out: {reason}")
    for task in able:
        sizes = lengths if task.generated or task.phase == "stream" else lengths[:1]
        try:
            wanted = [Wanted.of(task, replace(request, length=size)) for size in sizes]
        except KvfoldError as refused:
            if task.name in names:
                raise
            say(f"left out: {task.name}: {refused}")
            continue
        bad = [sample for sample in wanted[0].samples if isinstance(sample, Unreadable)]
        for sample in bad[:ROWS]:
            say(f"cannot be read: {sample.where}: {sample.why}")
        if len(bad) > ROWS:
            say(f"cannot be read: {len(bad) - ROWS} more rows of {task.name}")
        found = True
        yield from wanted
    if not found:
        raise KvfoldError("none of the tasks can be run: see above what they need")


def with_data(names: Sequence[str], request: Request) -> tuple[list[Task], list[str]]:
    """The tasks of these names that there is data for, and what each benchmark's others want.

    No model is needed. Raises KvfoldError for an unknown name, for a task that was named itself
    and has no data, and where none has.
    """
    able: list[Task] = []
    absent: dict[str, dict[str, NoData]] = {}
    for task in select(names):
        missing = task.missing_data(request)
        if missing is None:
            able.append(task)
        elif task.name in names:
            raise missing
        else:
            absent.setdefault(task.benchmark, {})[task.name] = missing
    reasons = [
        NoData.said(name if len(of) == len(families()[name]) else ", ".join(of), list(of.values()))
        for name, of in absent.items()
    ]
    if not able:
        raise KvfoldError(f"none of the tasks can be run: {'; '.join(reasons)}")
    return able, reasons


def _run(
    plan: Plan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> list[dict[str, Any]]:
    samples, cells = session.store(folder), plan.cells()
    for _ in session.evaluate(plan, samples, here(work(plan.subject.name), model, tokenizer)):
        pass
    records = session.summarize(samples.load().records)
    session.write_records(folder, records)
    own = [record for record in records if record.cell in cells]
    if not any(record.samples for record in own):
        reasons = dict.fromkeys(reason for record in own for reason in record.errors)
        raise KvfoldError(f"no sample has an answer: {'; '.join(list(reasons)[:3])}")
    return [flat(record, Result) for record in own]


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]
