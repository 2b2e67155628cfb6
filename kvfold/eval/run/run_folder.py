# SPDX-License-Identifier: Apache-2.0
"""Resumable runs: missing samples of a folder are evaluated and appended to its file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvfold.contexts.files.write import replacing
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.cell_result import CellResult, cell_result
from kvfold.eval.run.job import EvalJob
from kvfold.eval.run.plan import EvalPlan
from kvfold.eval.run.sample_result import SampleResult
from kvfold.eval.tasks import tasks
from kvfold.jobs.executor import RunJobs
from kvfold.jobs.records import RecordFile

SAMPLES, RECORDS = "samples.jsonl", "records.jsonl"


def samples_file(folder: Path) -> RecordFile[SampleResult]:
    """The samples file of a folder."""
    return RecordFile(folder / SAMPLES, SampleResult)


def run_missing(
    plan: EvalPlan, samples: RecordFile[SampleResult], workers: RunJobs[EvalJob, list[SampleResult]]
) -> Iterator[int]:
    """Runs the plan's samples that the file lacks; yields the number of finished samples.

    Results are on disk before the next job's are awaited, so a killed run resumes where it was.
    Raises KvfoldError if the file has other texts under the plan's sample numbers.
    """
    cells = plan.cells()
    done = {
        (line.cell, line.index): line.text for line in samples.load().records if line.cell in cells
    }
    jobs = list(plan.jobs(done))
    count = plan.total - sum(len(job.cells) for job in jobs)
    yield count
    for lines in workers(jobs):
        samples.add(lines)
        count += len(lines)
        yield count


def summarize(samples: list[SampleResult], cells: Iterable[EvalCell] = ()) -> list[CellResult]:
    """One record per cell of `samples`: first those of `cells`, then by first appearance.

    The first line counts if concurrent runs wrote a sample twice.
    """
    by_cell: dict[EvalCell, dict[int, SampleResult]] = {cell: {} for cell in cells}
    for sample in samples:
        by_cell.setdefault(sample.cell, {}).setdefault(sample.index, sample)
    known = tasks()

    def of(cell: EvalCell) -> list[SampleResult]:
        return list(by_cell.get(cell, {}).values())

    return [
        cell_result(known[cell.task], cell, of(cell), of(cell.reference))
        for cell, found in by_cell.items()
        if found
    ]


def write_records(folder: Path, records: list[CellResult]) -> Path:
    """Replaces the folder's records file atomically; returns its path."""
    path = folder / RECORDS
    with replacing(path) as temporary:
        temporary.write_text("".join(f"{record.model_dump_json()}\n" for record in records))
    return path
