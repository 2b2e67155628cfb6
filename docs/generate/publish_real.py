# SPDX-License-Identifier: Apache-2.0
"""Result pages of the really trained model, from the folder of `docs/results/run.sh`:

    python -m docs.generate.publish_real [FOLDER]

Writes records, samples, report, picture and README.md into docs/results, docs/which-method.md, and
the first lines of README.md. A run that goes on, or was stopped, is published as far as it is: of a
task, the samples that all methods of the picture have met which have met any. Cells that FOLDER
lacks, or has fewer samples of, stay as published, so that steps can run on several machines. The
pages say what is lacking. Equal samples give equal files. Without FOLDER the pages are made anew of
the published records. Raises KvfoldError for samples of another model than the published ones.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from docs.generate import compact_samples, real_page, real_picture, which_method
from docs.generate.made import RESULTS, ROOT
from docs.generate.needle_rows import core
from docs.generate.real_headline import MODEL
from kvfold.errors import KvfoldError
from kvfold.eval.run import run_folder
from kvfold.eval.run.cell import FULL, EvalCell, EvaluatedModel
from kvfold.eval.run.cell_result import CellResult
from kvfold.eval.run.plan import contenders
from kvfold.eval.run.sample_result import SampleResult
from kvfold.eval.tasks import select
from kvfold.methods.description import without_files
from kvfold.methods.registry import listed
from kvfold.report import write
from kvfold.report.board import boards
from kvfold.report.load import load_results

SCRIPT = RESULTS / "run.sh"
SAMPLE_ROWS = "samples.csv.gz"


def planned() -> list[real_page.Planned]:
    """Cells that `real_leaderboard.sh` runs, with all fitted files there."""
    return [unit for command in commands("BOOK") for unit in of_command(command)]


def commands(*paths: str) -> list[list[str]]:
    """Commands of `real_leaderboard.sh` with its arguments `paths`, each as its words."""
    own = {name: value for name, value in os.environ.items() if name not in ("STEPS", "METHODS")}
    told = subprocess.run(
        ["bash", str(SCRIPT), *paths],
        env=own | {"PLAN": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [shlex.split(line) for line in told.splitlines()]


def option(command: Sequence[str], name: str) -> str:
    """The value of a command's option; empty if it is not given."""
    flag = f"--{name}"
    return command[command.index(flag) + 1] if flag in command else ""


def of_command(command: Sequence[str]) -> list[real_page.Planned]:
    """Tasks, lengths and contenders of one `kvfold eval` command."""
    named = option(command, "lengths").split(",")
    lengths = [int(length) if length else None for length in named]
    aware, samples = "--question-aware" in command, int(option(command, "samples"))
    budgets = option(command, "budgets").split(",")
    return [
        real_page.Planned(
            real_page.Unit(task.name, length if task.has_lengths else None, aware),
            samples,
            frozenset(contenders(listed(option(command, "methods")), budgets)),
            not task.by_likelihood,
        )
        for task in select(option(command, "tasks").split(","))
        for length in lengths
    ]


def settled(samples: Sequence[SampleResult]) -> list[SampleResult]:
    """Samples that each method of the picture has met, if it has met any of their task."""
    begun: dict[EvalCell, set[str]] = defaultdict(set)
    met: dict[tuple[EvalCell, int], set[str]] = defaultdict(set)
    for sample in samples:
        cell, name = sample.cell, without_files(sample.cell.method)
        if name in {FULL, *real_picture.LINES}:
            begun[cell.reference].add(name)
            met[cell.reference, sample.index].add(name)
    return [
        sample
        for sample in samples
        if met[sample.cell.reference, sample.index] == begun[sample.cell.reference]
    ]


def of_newest_files(samples: Sequence[SampleResult]) -> list[SampleResult]:
    """Samples of each method with the files that it read last, such as a scorer fitted anew."""
    newest = {sample.cell.method: sample.cell.files for sample in samples}
    return [sample for sample in samples if sample.cell.files == newest[sample.cell.method]]


def named(results: Sequence[CellResult]) -> list[CellResult]:
    """The records under the model's name, where it was loaded from a folder."""

    def renamed(result: CellResult) -> CellResult:
        subject = result.cell.subject.model_copy(update={"name": MODEL})
        cell = result.cell.model_copy(update={"subject": subject})
        return result.model_copy(update={"cell": cell})

    return [renamed(result) for result in results]


# A cell as a row of published samples has it, but for its sample.
Key = tuple[str, ...]
KEY = ("task", "length", "question_aware", "data", "method", "budget")


def key(cell: EvalCell) -> Key:
    """The published columns of a cell."""
    told = cell.task, cell.length, int(cell.protocol.question_aware), ";".join(cell.data)
    return tuple("" if one is None else str(one) for one in (*told, cell.method, cell.budget))


def as_before(result: CellResult, known: set[EvaluatedModel]) -> CellResult:
    """A result of a `known` model, where records of before do not say how it answers."""
    cell = result.cell
    subject = cell.subject.model_copy(update={"answering": None})
    if subject not in known:
        return result
    return result.model_copy(update={"cell": cell.model_copy(update={"subject": subject})})


def merged(
    results: Sequence[CellResult], out: Path
) -> tuple[list[CellResult], list[dict[str, str]], set[Key]]:
    """Records of the run and those `out` holds, of each cell the one with more samples, the run's
    if as many; also the rows of samples that stay, and the cells whose samples are the run's.

    Raises KvfoldError for a run of another model.
    """
    before: Sequence[CellResult] = []
    if (out / run_folder.RECORDS).is_file():
        before = load_results([out / run_folder.RECORDS])
    known = {one.cell.subject for one in before}
    results = [as_before(one, known) for one in results]
    others = {one.cell.subject for one in results} - known
    if before and others:
        raise KvfoldError(f"the run is of {others}, and {out} holds results of {known}")
    counts = {key(result.cell): result.samples for result in before}
    ours = [one for one in results if one.samples >= counts.get(key(one.cell), 0)]
    replaced = {key(one.cell) for one in ours}
    stay = [one for one in before if key(one.cell) not in replaced]
    rows = compact_samples.read(out / SAMPLE_ROWS) if stay else []
    rows = [row for row in rows if tuple(row[name] for name in KEY) not in replaced]
    return [*stay, *ours], rows, replaced


def publish(folder: Path, root: Path = ROOT) -> None:
    """Writes the files below `root`; the run's `folder` is read as a copy, as it may still grow."""
    out = root / "docs" / "results"
    with tempfile.TemporaryDirectory() as name:
        copied = Path(name)
        shutil.copy(folder / run_folder.SAMPLES, copied)
        samples = settled(
            of_newest_files(run_folder.counted(run_folder.samples_file(copied).load().records))
        )
    results = named(run_folder.summarize(samples))
    results, rows, ours = merged(results, out)
    fresh = [sample for sample in samples if key(sample.cell) in ours]
    compact_samples.write(fresh, out / SAMPLE_ROWS, rows)
    run_folder.write_records(out, results)
    make_pages(results, root)


def make_pages(results: Sequence[CellResult], root: Path = ROOT) -> None:
    """Writes report, picture and pages of the records below `root`, where their samples are."""
    out = root / "docs" / "results"
    with tempfile.TemporaryDirectory() as name:
        for path in write.write(results, Path(name)).paths:
            if path.name in ("report.md", "tasks.md") or path.match("needles-*.png"):
                shutil.copy(path, out)
    real_picture.draw(boards(core(results)), out / real_picture.FILE)
    which_method.write(results, out, root / "docs" / which_method.PAGE.name)
    (out / "README.md").write_text(real_page.page(results, planned()), encoding="utf-8")
    front = root / "README.md"
    front.write_text(real_page.readme(front.read_text("utf-8"), results), encoding="utf-8")


def main() -> None:
    if sys.argv[1:]:
        publish(Path(sys.argv[1]))
    else:
        make_pages(load_results([RESULTS / run_folder.RECORDS]))


if __name__ == "__main__":
    main()
