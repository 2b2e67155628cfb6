# SPDX-License-Identifier: Apache-2.0
"""Resumable runs: missing samples of a folder are evaluated and appended to its file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.cell_result import CellResult, cell_result
from kvfold.eval.run.job import EvalJob
from kvfold.eval.run.plan import EvalPlan
from kvfold.eval.run.sample_result import SampleResult
from kvfold.eval.tasks import SampleRequest, Task, UnreadableSample, tasks
from kvfold.evidence.grouped import grouped
from kvfold.evidence.outputs import check_apart, check_own
from kvfold.evidence.records import RecordFile
from kvfold.jobs.executor import RunJobs

SAMPLES, RECORDS = "samples.jsonl", "records.jsonl"


def samples_file(folder: Path) -> RecordFile[SampleResult]:
    """The samples file of a folder."""
    return RecordFile(folder / SAMPLES, SampleResult)


def check_unread(folder: Path, request: SampleRequest) -> None:
    """Raises KvfoldError if a run in `folder` would write to a file that the request reads.

    As for records of another program, which it would replace.
    """
    check_apart(
        [folder / SAMPLES, folder / RECORDS], [request.data, request.haystack, request.shots]
    )
    check_own(folder / RECORDS)


def run_missing(
    plan: EvalPlan, samples: RecordFile[SampleResult], workers: RunJobs[EvalJob, list[SampleResult]]
) -> Iterator[int]:
    """Runs the plan's samples that the file lacks; yields the number of finished samples.

    Results of a cell are on disk before the next are awaited, so a killed run resumes where it was.
    Samples that ended in an error are run again, but not those that could not be read. Raises
    KvfoldError if the file has other texts under the plan's sample numbers, or an unknown task.
    """
    cells, found = plan.cells(), samples.load().records
    for line in found:
        _task(line.cell)
    unreadable = {
        (cell, index)
        for cell, of in cells.items()
        for index, sample in enumerate(of.samples)
        if isinstance(sample, UnreadableSample)
    }
    done = {
        (line.cell, line.index): line.text
        for line in found
        if line.cell in cells and (line.error is None or (line.cell, line.index) in unreadable)
    }
    failed = {(line.cell, line.index, line.error) for line in found if line.error is not None}
    jobs = list(plan.jobs(done))
    count = plan.total - sum(len(job.cells) * len(job.samples) for job in jobs)
    yield count
    for lines in workers(jobs):
        samples.add([line for line in lines if (line.cell, line.index, line.error) not in failed])
        count += len(lines)
        yield count


def counted(samples: Iterable[SampleResult]) -> list[SampleResult]:
    """One line of each sample of a cell: the first without an error, or else the first."""
    found: dict[tuple[EvalCell, int], SampleResult] = {}
    for line in samples:
        before = found.setdefault((line.cell, line.index), line)
        if before.error is not None and line.error is None:
            found[line.cell, line.index] = line
    return list(found.values())


def summarize(samples: list[SampleResult], cells: Iterable[EvalCell] = ()) -> list[CellResult]:
    """One record per cell of `samples`: first those of `cells`, then by first appearance.

    Raises KvfoldError for an unknown task.
    """
    by_cell = grouped((sample.cell, sample) for sample in counted(samples))
    return [
        cell_result(_task(cell), cell, by_cell[cell], by_cell.get(cell.reference, []))
        for cell in dict.fromkeys([*cells, *by_cell])
        if cell in by_cell
    ]


def write_records(folder: Path, records: list[CellResult]) -> Path:
    """Replaces the folder's records file atomically; returns its path."""
    RecordFile(path := folder / RECORDS, CellResult).replace(records)
    return path


def conclude(plan: EvalPlan, folder: Path) -> list[CellResult]:
    """Writes the records of all samples in `folder`; returns those of the plan's cells."""
    cells = plan.cells()
    records = summarize(samples_file(folder).load().records, cells)
    write_records(folder, records)
    return [record for record in records if record.cell in cells]


def _task(cell: EvalCell) -> Task:
    task = tasks().get(cell.task)
    if task is None:
        raise KvfoldError(
            f"there are samples of the task {cell.task}, which this version does not know: choose "
            "another --out"
        )
    return task
