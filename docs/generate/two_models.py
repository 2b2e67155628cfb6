# SPDX-License-Identifier: Apache-2.0
"""docs/results/two_models: the tables and pictures of its page, from records alone:

    python -m docs.generate.two_models [FOLDER]

FOLDER is that of `docs/results/two_models/run.sh`, whose records and samples are published first.
Needles of SmolLM2 are also those of docs/results. Prose is written by hand.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes

from docs.generate import compact_samples, made
from docs.generate.needle_rows import NONE
from docs.generate.publish_real import settled
from docs.generate.real_page import WHEN
from kvfold.eval.run import run_folder
from kvfold.eval.run.cell import FULL
from kvfold.eval.run.cell_result import CellResult
from kvfold.evidence.grouped import grouped
from kvfold.evidence.pictures import legend_below
from kvfold.methods.description import without_files
from kvfold.report.headline import FIFTH
from kvfold.report.load import load_results
from kvfold.report.style import COLORS, GREY, label

PUBLISHED = made.RESULTS / "two_models"
# By the folder that `make real` makes.
MODELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma-3-270M"}
NOVEL = "ruler_niah_single_2"
TASKS = {
    "ruler_niah_single_1": "noise",
    NOVEL: "novel",
    "needle_paraphrased": "paraphrased",
}
LENGTH, SAMPLES = 1024, 40
# What the full cache must answer before a task tells methods apart, in percent.
TELLING = 60.0
MARKERS = {"noise": "o", "novel": "s", "paraphrased": "^"}


class Place(NamedTuple):
    """A method on a model's task, before or after the question is known."""

    model: str
    task: str
    aware: bool
    method: str


Found = Mapping[Place, CellResult]


def found() -> Found:
    """The published cells at a fifth of the cache, and the full cache's."""
    files = [made.RESULTS / run_folder.RECORDS, PUBLISHED / run_folder.RECORDS]
    return {
        _place(one): one
        for file in files
        if file.is_file()
        for one in load_results([file])
        if _shown(one)
    }


def _place(result: CellResult) -> Place:
    cell = result.cell
    task, aware = TASKS[cell.task], cell.protocol.question_aware
    return Place(cell.subject.name, task, aware, without_files(cell.method))


def _shown(result: CellResult) -> bool:
    asked = result.cell.task in TASKS and result.cell.length == LENGTH
    return asked and result.score is not None and result.kept_nominal in (FIFTH, None)


def methods_of(cells: Found) -> list[str]:
    """Methods that ran on all models' tasks, those that find most before the question first."""
    before = {place: cell for place, cell in cells.items() if not place.aware}
    places = {place[:3] for place in before if place.method != FULL}
    own = grouped(
        (place.method, _score(cell)) for place, cell in before.items() if place[:3] in places
    )
    whole = [name for name, scores in own.items() if len(scores) == len(places)]
    return sorted(whole, key=lambda name: (name != FULL, -sum(own[name]), name))


def _score(result: CellResult | None) -> float:
    assert result is not None and result.score is not None
    return result.score.value


def tells(cells: Found, model: str, task: str, aware: bool) -> bool:
    """True where the full cache answers enough for methods to differ."""
    full = cells.get(Place(model, task, aware, FULL))
    return full is not None and _score(full) >= TELLING


def table(cells: Found, aware: bool) -> str:
    """A row for each method, a column for each model's task; italics where a task tells little."""
    columns = [(model, task) for model in MODELS.values() for task in TASKS.values()]
    head = ["method", *(f"{model.split('-')[0]}, {task}" for model, task in columns)]

    def written(model: str, task: str, method: str) -> str:
        own = cells.get(Place(model, task, aware, method))
        if own is None:
            return NONE
        few = "" if own.samples >= SAMPLES else f" ({own.samples})"
        text = f"{_score(own):.1f}{few}"
        return text if tells(cells, model, task, aware) else f"*{text}*"

    lines = [
        [method, *(written(*column, method) for column in columns)] for method in methods_of(cells)
    ]
    return made.table(head, lines, left=[0])


def _published() -> Sequence[CellResult]:
    return load_results([PUBLISHED / run_folder.RECORDS])


def other_tasks() -> str:
    """The full cache's scores on the tasks that it alone was asked; italics as in `table`."""
    scores: dict[str, dict[str, float]] = {}
    for one in _published():
        cell = one.cell
        if cell.task not in TASKS and cell.method == FULL and one.score is not None:
            scores.setdefault(cell.task, {})[cell.subject.name] = one.score.value

    def written(score: float | None) -> str:
        if score is None:
            return NONE
        return f"{score:.0f}" if score >= TELLING else f"*{score:.0f}*"

    lines = [
        [model.split("-")[0], *(written(own.get(model)) for own in scores.values())]
        for model in MODELS.values()
    ]
    names = [task.removeprefix("needle_").replace("_", " ") for task in scores]
    return made.table(["model", *names], lines, left=[0])


def mended() -> str:
    """KVzip in other ways, and methods with recall, in Gemma's novel before the question."""
    own = [
        one
        for one in _published()
        if (one.cell.subject.name, one.cell.task) == (MODELS["gemma3"], NOVEL)
        and not one.cell.protocol.question_aware
        and (one.cell.method.startswith("kvzip") or "+ recall" in one.cell.method)
    ]
    own.sort(key=lambda one: (-_score(one), one.kept_nominal))
    lines = [
        [f"`{one.cell.method}`", f"{one.kept_nominal:g}", f"{_score(one):.0f}", str(one.samples)]
        for one in own
    ]
    return made.table(["method", "kept", "found, %", "samples"], lines, left=[0])


def draw(cells: Found, model: str, path: Path) -> None:
    """A point for each method and task, before and after the question is known."""
    names = methods_of(cells)[::-1]
    with made.picture(path, 7.2, 0.42 * len(names) + 2.2) as drawn:
        panels = drawn.subplots(1, 2, sharey=True)
        for panel, aware in zip(panels, WHEN, strict=True):
            panel.set_title(WHEN[aware].replace("question ", "question\n"), fontsize=made.LETTERS)
            _points(panel, cells, model, aware, names)
        panels[0].set_yticks(range(len(names)), [label(name) for name in names])
        legend_below(drawn, panels, ncols=3, frameon=False, fontsize=made.LETTERS)


def _points(panel: Axes, cells: Found, model: str, aware: bool, names: Sequence[str]) -> None:
    for number, (task, marker) in enumerate(MARKERS.items()):
        own = [(cells.get(Place(model, task, aware, name)), row) for row, name in enumerate(names)]
        scores = [_score(cell) for cell, _ in own if cell]
        rows = [row for cell, row in own if cell]
        panel.scatter(
            scores, rows, s=64, marker=marker, label=task, alpha=0.85, clip_on=False, zorder=3,
            color=COLORS[number] if tells(cells, model, task, aware) else GREY,
        )  # fmt: skip
    panel.set_xlim(-5, 105)
    panel.set_xlabel("found, %")
    panel.tick_params(length=0)
    panel.grid(color="#e4e4e4", linewidth=0.8)
    panel.spines[:].set_visible(False)


def parts(cells: Found) -> dict[str, str]:
    """The page's parts by name."""
    tables = {
        f"### {when[0].upper()}{when[1:]}": table(cells, aware) for aware, when in WHEN.items()
    }
    told = "\n\n".join(f"{title}\n\n{made}" for title, made in tables.items())
    return {
        "tables": told,
        "ways of KVzip": mended(),
        "other tasks": other_tasks(),
        "records": _records(cells),
    }


def _records(cells: Found) -> str:
    """Code and machines of the records."""
    commits = dict.fromkeys(one for cell in cells.values() for one in cell.commits if one)
    cpus = dict.fromkeys(setup.cpu for cell in cells.values() for setup in cell.setups)
    return f"Commits {', '.join(commits)}; {'; '.join(cpus)}."


def publish(folder: Path) -> None:
    """Writes the run's records, under the models' names, and the samples of each model."""
    with tempfile.TemporaryDirectory() as name:
        copied = Path(name) / run_folder.SAMPLES
        copied.write_bytes((folder / run_folder.SAMPLES).read_bytes())
        every = settled(run_folder.counted(run_folder.samples_file(Path(name)).load().records))
    by_model = grouped((Path(sample.cell.subject.name).name, sample) for sample in every)
    results = []
    for folder_name, samples in by_model.items():
        named = {"name": MODELS[folder_name]}
        for one in run_folder.summarize(samples):
            subject = one.cell.subject.model_copy(update=named)
            cell = one.cell.model_copy(update={"subject": subject})
            results.append(one.model_copy(update={"cell": cell}))
        compact_samples.write(samples, PUBLISHED / f"{folder_name}.csv.gz")
    run_folder.write_records(PUBLISHED, results)


def write() -> None:
    """Writes pictures and page of what is published."""
    cells = found()
    for name, model in MODELS.items():
        draw(cells, model, PUBLISHED / f"{name}.svg")
    page = PUBLISHED / "README.md"
    page.write_text(made.with_parts(page, "two_models", parts(cells)), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        publish(Path(sys.argv[1]))
    write()
