# SPDX-License-Identifier: Apache-2.0
"""A run: what is missing in a folder is evaluated and written down, sample by sample."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvfold.eval.run.cell import Cell
from kvfold.eval.run.job import Job
from kvfold.eval.run.plan import Plan
from kvfold.eval.run.result import Result, result
from kvfold.eval.run.sample import Sample
from kvfold.eval.tasks import tasks
from kvfold.jobs.executor import Workers
from kvfold.jobs.records import Store

SAMPLES, RECORDS = "samples.jsonl", "records.jsonl"


def store(folder: Path) -> Store[Sample]:
    """The file of a folder that samples are added to."""
    return Store(folder / SAMPLES, Sample)


def evaluate(
    plan: Plan, samples: Store[Sample], workers: Workers[Job, list[Sample]]
) -> Iterator[int]:
    """Runs what `samples` does not hold yet; yields how many of the plan's are done.

    A job's samples are on the disk before the next is asked for, so that a run that is killed
    goes on where it was. Raises KvfoldError for a file that holds other samples.
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


def summarize(samples: list[Sample]) -> list[Result]:
    """A record of every cell that `samples` are of, in the order of their first appearance.

    Where a killed run wrote a sample that another wrote too, the first counts.
    """
    by_cell: dict[Cell, dict[int, Sample]] = {}
    for sample in samples:
        by_cell.setdefault(sample.cell, {}).setdefault(sample.index, sample)
    known = tasks()

    def of(cell: Cell) -> list[Sample]:
        return list(by_cell.get(cell, {}).values())

    return [result(known[cell.task], cell, of(cell), of(cell.reference)) for cell in by_cell]


def write_records(folder: Path, records: list[Result]) -> Path:
    """Replaces the folder's records; a reader sees the old file or the new one."""
    path = folder / RECORDS
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(f"{record.model_dump_json()}\n" for record in records))
    os.replace(temporary, path)
    return path
