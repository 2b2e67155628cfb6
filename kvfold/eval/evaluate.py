# SPDX-License-Identifier: Apache-2.0
"""Evaluation from Python: `kvfold eval` with a model that is already loaded."""

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
from kvfold.eval.run import run_folder
from kvfold.eval.run.cell import EvalProtocol, EvaluatedModel
from kvfold.eval.run.cell_result import CellResult, flat
from kvfold.eval.run.job import worker_spec
from kvfold.eval.run.plan import EvalPlan, TaskSamples, as_list, contenders
from kvfold.eval.tasks import (
    NoData,
    SampleRequest,
    Task,
    UnreadableSample,
    families,
    select,
    source,
)
from kvfold.hf.arguments import checked_arguments, count_of
from kvfold.hf.chat_template import token_count
from kvfold.hf.models import trained_length
from kvfold.jobs.executor import here
from kvfold.methods.base import Method
from kvfold.writing import make_folder

# Default length of generated samples: a quarter of the model's context, at most the papers' 4096.
# KVzip reads a text twice, so a quarter leaves room.
SHARE, USUAL = 4, 4096

# Unreadable rows that are named one by one.
ROWS = 10

Note = Callable[[str], None]


@checked_arguments
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
    answer_tokens: int | None = None,
    batch_size: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Records of tasks × methods × budgets, of the full cache and of the baselines.

    Each record is a flat dictionary with the columns of `records.csv`, so
    `pandas.DataFrame(records)` is their table. Options have the names of `kvfold eval`, which has
    more. With `out`, samples and records are written to that folder; a stopped run continues
    there, and `kvfold report` reads it. Raises KvfoldError for unknown names, for data that cannot
    be read or that a file of `out` would replace, and if no sample has an answer.
    """
    competing = contenders([str(one) for one in as_list(methods)], as_list(budgets))
    readable = max_length or readable_tokens(model)
    request = SampleRequest(
        samples=samples,
        seed=seed,
        count=partial(token_count, tokenizer),
        data=None if data is None else str(data),
        haystack=None if haystack is None else Path(haystack),
    )
    if out is not None:
        run_folder.check_unread(Path(out), request)
    asked = [usual_length(readable)] if lengths is None else as_list(lengths)
    sizes = [count_of("lengths", each) for each in asked]
    name = getattr(model.config, "name_or_path", "") or type(model).__name__
    plan = EvalPlan(
        wanted=tuple(drawn(as_list(tasks), request, sizes)),
        subject=EvaluatedModel.of(name, model, tokenizer),
        protocol=EvalProtocol(
            question_aware=question_aware, max_length=readable, answer_tokens=answer_tokens
        ),
        contenders=tuple(competing),
        batch_size=batch_size,
    )
    if out is not None:
        make_folder(Path(out))
        return _run(plan, model, tokenizer, Path(out))
    with TemporaryDirectory() as folder:
        return _run(plan, model, tokenizer, Path(folder))


def readable_tokens(model: PreTrainedModel) -> int:
    """The model's maximal context in tokens; 4096 if its configuration has none."""
    return trained_length(model) or USUAL


def usual_length(readable: int) -> int:
    """Default length of generated samples in tokens, a power of two."""
    return int(min(USUAL, 2 ** (readable // SHARE).bit_length() // 2))


def drawn(
    names: Sequence[str],
    request: SampleRequest,
    lengths: Sequence[int],
    say: Note = lambda text: None,
) -> Iterator[TaskSamples]:
    """Samples of all tasks in `names`; a benchmark's name stands for its tasks that have data.

    `say` receives one line per task left out and per unreadable row, and one for all tasks whose
    data has no rows of them. Raises KvfoldError if a task named itself cannot be drawn or has no
    rows, and if none can.
    """
    found, empty = False, list[str]()
    able, reasons = with_data(names, request)
    for reason in reasons:
        say(f"left out: {reason}")
    for task in able:
        sizes = list(dict.fromkeys(lengths))
        if not source.at_lengths(task, request):
            if task.by_likelihood and len(sizes) > 1:
                raise KvfoldError(
                    f"{task.name} cuts its texts into windows of one length: give one, and run "
                    "each other length into a folder of its own"
                )
            sizes = sizes[:1]
        try:
            wanted = [TaskSamples.of(task, replace(request, length=size)) for size in sizes]
        except KvfoldError as refused:
            if task.name in names:
                raise
            say(f"left out: {task.name}: {refused}")
            continue
        if not any(each.samples for each in wanted):
            if task.name in names:
                raise KvfoldError(f"{request.data} has no rows of {task.name}")
            empty.append(task.name)
            continue
        bad = [sample for sample in wanted[0].samples if isinstance(sample, UnreadableSample)]
        for sample in bad[:ROWS]:
            say(f"cannot be read: {sample.where}: {sample.why}")
        if len(bad) > ROWS:
            say(f"cannot be read: {len(bad) - ROWS} more rows of {task.name}")
        found = True
        yield from wanted
    if empty:
        say(f"left out: {request.data} has no rows of {', '.join(empty)}")
    if not found:
        raise KvfoldError("none of the tasks can be run: see above what they need")


def with_data(names: Sequence[str], request: SampleRequest) -> tuple[list[Task], list[str]]:
    """Tasks of these names that have data, and one sentence per benchmark on missing data.

    Needs no model. Raises KvfoldError for an unknown name, for a task named itself that has no
    data, and if none has.
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
    plan: EvalPlan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> list[dict[str, Any]]:
    """Runs a plan in `folder`; returns its flat records. Raises KvfoldError without any answer."""
    worker = here(worker_spec(plan.subject.name), model, tokenizer)
    for _ in run_folder.run_missing(plan, run_folder.samples_file(folder), worker):
        pass
    own = run_folder.conclude(plan, folder)
    if not any(record.samples for record in own):
        reasons = dict.fromkeys(reason for record in own for reason in record.errors)
        raise KvfoldError(f"no sample has an answer: {'; '.join(list(reasons)[:3])}")
    return [flat(record, CellResult) for record in own]
