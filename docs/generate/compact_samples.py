# SPDX-License-Identifier: Apache-2.0
"""Samples of an evaluation, small enough to publish: `compact_samples.py FOLDER FILE.csv.gz`.

A row for each answer of each sample, in order of evaluation: cell, score in [0, 1] (for a
perplexity, the mean negative log-likelihood), the entries kept over those seen, and the first
characters of the answer.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvfold.eval.run.run_folder import counted, samples_file
from kvfold.eval.run.sample_result import SampleResult
from kvfold.eval.tasks import tasks

CHARACTERS = 200
COLUMNS = (
    "task", "length", "question_aware", "data", "method", "budget", "index", "text", "turn",
    "score", "tokens", "ended", "kept", "prediction", "error",
)  # fmt: skip


def rows(sample: SampleResult) -> Iterator[dict[str, Any]]:
    """Published rows of a sample."""
    cell, metric = sample.cell, tasks()[sample.cell.task].metric
    asked = {
        "task": cell.task,
        "length": cell.length,
        "question_aware": int(cell.protocol.question_aware),
        "data": ";".join(cell.data),
        "method": cell.method,
        "budget": cell.budget,
        "index": sample.index,
        "text": sample.text,
    }
    if sample.outcome is None:
        yield asked | {"error": (sample.error or "")[:CHARACTERS]}
        return
    for turn, answer in enumerate(sample.outcome.answers):
        yield asked | {
            "turn": turn,
            "score": answer.nll if metric is None else answer.scores[metric],
            "tokens": answer.tokens,
            "ended": answer.ended,
            "kept": f"{sample.outcome.held.kept:.5f}",
            "prediction": answer.prediction[:CHARACTERS],
        }


def write(
    samples: Iterable[SampleResult], out: Path, before: Iterable[dict[str, Any]] = ()
) -> None:
    """Writes the file, beginning with the rows `before`; equal samples give equal bytes."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="")
    writer.writeheader()
    writer.writerows(before)
    for sample in samples:
        writer.writerows(rows(sample))
    out.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def read(file: Path) -> list[dict[str, Any]]:
    """Rows of a published file."""
    return list(csv.DictReader(io.StringIO(gzip.decompress(file.read_bytes()).decode())))


def main(folder: Path, out: Path) -> None:
    """Writes the file of a run's folder."""
    write(counted(samples_file(folder).load().records), out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
