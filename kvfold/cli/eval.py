# SPDX-License-Identifier: Apache-2.0
"""`kvfold eval`: tasks × methods × budgets, with a record for each."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvfold.cli import options
from kvfold.cli.bench import numbers, words
from kvfold.cli.console import counted
from kvfold.errors import KvfoldError
from kvfold.evidence.tables import table
from kvfold.loading import Loading, load
from kvfold.terminal import messages, print_json
from kvfold.writing import check_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvfold.eval.run.cell_result import CellResult
    from kvfold.eval.run.job import EvalJob
    from kvfold.eval.run.plan import EvalPlan, TaskSamples
    from kvfold.eval.run.sample_result import SampleResult
    from kvfold.eval.tasks import SampleRequest
    from kvfold.jobs.executor import RunJobs


@options.with_options(loading=options.loading)
def command(
    task: Annotated[
        str, typer.Option("--tasks", help='Tasks or benchmarks: "ruler,niah", "kv_retrieval".')
    ],
    place: options.ModelPlace = None,
    methods: Annotated[
        str, typer.Option(help='"snapkv,pyramidkv:window=8,snapkv + kivi"; see `kvfold methods`.')
    ] = "snapkv,pyramidkv,kvzip",
    budgets: Annotated[
        str, typer.Option(help='What to keep: "0.2,512,1GiB"; "" for methods without a budget.')
    ] = "0.2",
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples per task.", show_default="the benchmark's")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens of generated samples, answer included.",
            show_default="a power of two, a quarter of what the model reads",
        ),
    ] = None,
    named: options.ModelOption = None,
    question_aware: options.QuestionAware = False,
    conversation: Annotated[
        bool, typer.Option("--conversation", help="SCBench's queries as turns of a conversation.")
    ] = False,
    gold_history: Annotated[
        bool,
        typer.Option(
            "--gold-history", help="Later turns see the right answers, not the model's own."
        ),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="JSONL file, folder of them, or hub dataset; a text file for perplexity."
        ),
    ] = None,
    haystack: Annotated[
        Path | None, typer.Option(help="Text to hide needles in: a file or a folder.")
    ] = None,
    word_lists: Annotated[
        Path | None, typer.Option("--words", help="Folder of word lists.")
    ] = None,
    shots: Annotated[Path | None, typer.Option(help="Solved examples, JSONL.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions per shared context.")] = 4,
    depths: Annotated[int, typer.Option(min=1, help="Positions of a needle in the text.")] = 11,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=2, help="Tokens of prompt and answer, at most.", show_default="what the model reads"
        ),
    ] = None,
    answer_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of an answer, at most.", show_default="the benchmark's limit"
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples that are answered together.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of samples and of random methods.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Worker processes.", show_default="as many as cores, if models fit"
        ),
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Evaluate on the Ray cluster at this address.")
    ] = None,
    out: Annotated[
        Path, options.out_option(file_okay=False, help="Folder of records; a rerun resumes.")
    ] = Path("kvfold-eval"),
    as_json: options.Json = False,
    *,
    loading: Loading,
) -> None:
    """Evaluate methods at budgets, beside the full cache, random eviction, sinks and recent tokens,
    and a truncated context.

    Contexts are compressed before any question is known, unless --question-aware. `kvfold report`
    turns the records into tables, pictures and a page.
    """
    screen, model = messages(as_json), options.model_of(place, named)
    with screen.status("importing torch and transformers"):
        from kvfold.eval.evaluate import readable_tokens, usual_length, with_data
        from kvfold.eval.run import plan as planning
        from kvfold.eval.run.cell import EvalProtocol, EvaluatedModel
        from kvfold.eval.run.job import worker_spec
        from kvfold.eval.run.read_files import digests
        from kvfold.eval.run.run_folder import check_unread
        from kvfold.eval.tasks import SampleRequest
        from kvfold.hf.chat_template import token_count
        from kvfold.jobs.executor import here
        from kvfold.jobs.processes import processes
        from kvfold.methods.registry import listed
    # Refused here, before a large model is loaded.
    contenders = planning.contenders(listed(methods), words(budgets) if budgets else [])
    for name, _ in contenders:
        digests(name)
    request = SampleRequest(
        samples=samples,
        seed=seed,
        data=data,
        haystack=haystack,
        words=word_lists,
        shots=shots,
        questions=questions,
        conversation=conversation,
        depths=depths,
    )
    asked, benchmarks = numbers(lengths) if lengths else None, words(task)
    _check_places(haystack, word_lists, shots)
    check_folder(out)
    check_unread(out, request)
    with_data(benchmarks, request)
    network, tokenizer = load(model, loading)
    readable = max_length or readable_tokens(network)
    request = replace(request, count=partial(token_count, tokenizer))
    sizes = asked or [usual_length(readable)]
    plan = planning.EvalPlan(
        wanted=tuple(_drawn(screen, benchmarks, request, sizes)),
        subject=EvaluatedModel.of(model, network, tokenizer),
        protocol=EvalProtocol(
            question_aware=question_aware,
            history="gold" if gold_history else "own",
            max_length=readable,
            answer_tokens=answer_tokens,
        ),
        contenders=tuple(contenders),
        batch_size=batch_size,
    )
    if ray is not None:
        from kvfold.jobs.ray_cluster import cluster

        pool = cluster(worker_spec(model, loading), ray, workers)
    elif (count := workers or _fitting(network)) > 1:
        from torch.cuda import empty_cache

        del network
        empty_cache()  # the workers load their own models
        pool = processes(worker_spec(model, loading), count)
    else:
        pool = here(worker_spec(model, loading), network, tokenizer)
    idle = [method for method in dict(contenders) if not planning.streams(method)]
    if idle and any(each.task.phase == "stream" for each in plan.wanted):
        names = ", ".join(idle)
        note = f"left out on streamed texts, as they compress only prompts: {names}"
        screen.print(Text(note, style="yellow"))
    _evaluate(screen, plan, pool, out, as_json)


def _check_places(*places: Path | None) -> None:
    """Raises KvfoldError for a file or folder that does not exist."""
    for place in places:
        if place is not None and not place.exists():
            raise KvfoldError(f"there is no such file or folder: {place}")


def _drawn(
    screen: Console, names: Sequence[str], request: SampleRequest, lengths: Sequence[int]
) -> list[TaskSamples]:
    """Samples of all tasks; of a benchmark, tasks whose data is missing are skipped with a note."""
    from kvfold.eval.evaluate import drawn

    found = []
    with screen.status("drawing samples") as status:
        for each in drawn(names, request, lengths, lambda note: _note(screen, note)):
            found.append(each)
            status.update(f"drawing samples; {each.task.name} is done")
    return found


def _note(screen: Console, said: str) -> None:
    screen.print(Text(said, style="yellow"), soft_wrap=True)


def _fitting(network: PreTrainedModel) -> int:
    """Number of worker processes: one per core, with models in half of the memory; 1 off a CPU."""
    if network.device.type != "cpu":
        return 1
    weights = sum(each.numel() * each.element_size() for each in network.parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(os.cpu_count() or 1, memory // 2 // weights))


def _evaluate(
    screen: Console,
    plan: EvalPlan,
    pool: RunJobs[EvalJob, list[SampleResult]],
    out: Path,
    as_json: bool,
) -> None:
    """Runs the missing samples, with a progress bar, and writes the records."""
    from kvfold.cli.records import loaded, say_failures
    from kvfold.eval.run.cell_result import CellResult, flat
    from kvfold.eval.run.run_folder import RECORDS, conclude, run_missing, samples_file

    samples = samples_file(out)
    loaded(screen, samples)
    try:
        with counted(screen, "samples", plan.total) as show:
            for done in run_missing(plan, samples, pool):
                show(done)
    except KeyboardInterrupt:
        screen.print(Text(f"stopped; the same command resumes: {out}"))
        raise typer.Exit(130) from None
    asked, path = conclude(plan, out), out / RECORDS
    if as_json:
        found = [flat(record, CellResult) for record in asked]
        print_json({"records": found, "file": path.resolve()})
    else:
        _show(screen, asked)
    pages = shlex.join(["kvfold", "report", str(out)])
    said = f"records: {path.resolve()}\ntables and a page: {pages}"
    screen.print(Text(said), soft_wrap=True)
    say_failures(screen, asked)


def _show(screen: Console, records: Sequence[CellResult]) -> None:
    """Prints a table of scores, and one of each text's perplexities (lower is better)."""
    from kvfold.report.board import haystacks, perplexities_by_text

    known = [record for record in records if record.score]
    scores = [record for record in known if not record.lower_is_better]
    if scores:
        where = haystacks(scores)
        screen.print(_table("score, mean over tasks", scores))
        screen.print(Text(f"haystack: {where}\n" if where else ""), end="")
    for text, own in perplexities_by_text(known).items():
        screen.print(_table(f"perplexity of {text}", own))


def _table(title: str, records: Sequence[CellResult]) -> Table:
    """A row per method and budget, against the full cache on the same samples."""
    from kvfold.report.summary import rows

    names = ("score", "95 %", "− full", "kept", "bytes", "errors")
    shown = table(title, "method", "budget", *names, right=("budget", *names))
    for row in rows(records):
        assert row.score is not None
        shown.add_row(
            row.method,
            row.budget or "",
            f"{row.score.value:.1f}",
            "" if row.score.low is None else f"{row.score.low:.1f} to {row.score.high:.1f}",
            "" if row.gap is None else f"{row.gap.value:+.1f}",
            "" if row.kept is None else f"{row.kept:.1%}",
            "" if row.bytes_ratio is None else f"{row.bytes_ratio:.1%}",
            str(row.errors) if row.errors else "",
        )
    return shown
