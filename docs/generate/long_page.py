# SPDX-License-Identifier: Apache-2.0
"""Pictures and tables of docs/results/long/README.md: `python -m docs.generate.long_page`.

The records of `docs/results/long/measure_run.py` are docs/results/long/entries.jsonl for the
picture, runs.jsonl for the table; those of `docs/results/long/measure_kl.py` are kl.jsonl for
both. Equal records give equal files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from docs.generate.made import LETTERS, RESULTS, picture, table, write_part
from docs.results.long.measure_kl import STRETCH, AnswerDistance
from docs.results.long.measure_run import LongRun
from kvfold.evidence.grouped import grouped
from kvfold.evidence.intervals import Array, Interval, of_mean
from kvfold.evidence.records import RecordFile
from kvfold.report.style import BASELINE_DASH, COLORS, DASHES, GREY

OUT = RESULTS / "long"
PAGE = OUT / "README.md"
PICTURE, KL_PICTURE = "entries.svg", "kl.svg"
BEGIN = "<!-- made by docs/generate/long_page.py of {} -->"
COLUMNS = "model", "method", "entries", "answer, tokens", "most bytes", "bytes", "late / early step"
SIZE = 6.4, 5.4  # inches of a picture
DRAWN = 256  # entries of the answer, in the picture of the KL


def load(name: str) -> list[LongRun]:
    return RecordFile(OUT / name, LongRun).load().records


def load_distances() -> list[AnswerDistance]:
    return RecordFile(OUT / "kl.jsonl", AnswerDistance).load().records


def runs_table(runs: Sequence[LongRun]) -> str:
    """A row for each long answer."""
    return table(COLUMNS, [*map(_cells_of, runs)])


def _cells_of(run: LongRun) -> list[str]:
    most = max(mark.most_bytes for mark in run.marks)
    ratio = "" if run.late_over_early is None else f"{run.late_over_early:.2f}"
    cells = [run.model, f"`{run.method}`", f"{run.budget}", f"{run.tokens:,}", f"{most:,}"]
    return [*cells, "flat" if run.flat else "grow", ratio]


def evicted(row: AnswerDistance) -> slice:
    """The stretches of an answer that come after the first eviction."""
    first = (row.budget // row.interval + 1) * row.interval
    return slice(first // STRETCH, None)


def kl_table(rows: Sequence[AnswerDistance]) -> tuple[list[str], list[list[str]]]:
    """Columns, a pair for each budget, and a row for each method, as `ranked` has them."""
    of = grouped(((row.budget, row.method), row) for row in rows)
    columns, lines = ["method"], {method: [f"`{method}`"] for method in ranked(rows)}
    for budget in dict.fromkeys(budget for budget, _ in of):
        counts = {len(of[budget, method]) for method in lines}
        assert len(counts) == 1, f"methods at {budget} have answers of their own"
        columns += [f"KL at {budget}, n = {counts.pop()}", "same token"]
        for method, cells in lines.items():
            own = of[budget, method]
            kl = of_mean(_means([row.kl for row in own], own))
            agrees = np.mean(_means([row.agrees for row in own], own))
            cells += [f"{kl.value:.3f} ({max(kl.low, 0):.3f} to {kl.high:.3f})", f"{agrees:.1%}"]
    return columns, list(lines.values())


def ranked(rows: Sequence[AnswerDistance]) -> list[str]:
    """Methods by their KL at the smallest budget."""
    means = {
        method: np.mean(_means([row.kl for row in own], own))
        for method, own in _least(rows).items()
    }
    return sorted(means, key=means.__getitem__)


def alike(rows: Sequence[AnswerDistance]) -> str:
    """The method of the lowest KL at the smallest budget, and those not told apart from it."""
    first, *others = ranked(rows)
    own = _least(rows)
    same = [name for name in others if _apart(own[name], own[first]).low <= 0]
    told = f", which {len(own[first])} answers do not tell apart from "
    names = told + ", ".join(f"`{name}`" for name in same) if same else ""
    return f"Lowest KL at {own[first][0].budget} entries: `{first}`{names}."


def _least(rows: Sequence[AnswerDistance]) -> dict[str, list[AnswerDistance]]:
    """Methods with their rows at the smallest budget."""
    least = min(row.budget for row in rows)
    return grouped((row.method, row) for row in rows if row.budget == least)


def _apart(one: list[AnswerDistance], other: list[AnswerDistance]) -> Interval:
    """Mean difference of the KL on the same answers, with its interval."""
    base = {row.answer: row for row in other}
    theirs = [base[row.answer] for row in one]
    ours = _means([row.kl for row in one], one)
    return of_mean(ours - _means([row.kl for row in theirs], theirs))


def _means(numbers: Sequence[Sequence[float]], rows: Sequence[AnswerDistance]) -> Array:
    """Means of each answer's stretches after the first eviction."""
    after = [each[evicted(row)] for each, row in zip(numbers, rows, strict=True)]
    return np.array([np.mean(stretches) for stretches in after])


def _finish(axes: Axes) -> None:
    """Draws the legend below a picture over the tokens of an answer."""
    axes.set(xlabel="tokens of the answer")
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=LETTERS)


def draw(runs: Sequence[LongRun], path: Path) -> None:
    """Writes the picture: entries of a head over the generated tokens, a line for each method."""
    with picture(path, *SIZE) as drawn:
        axes = drawn.subplots()
        for number, run in enumerate(runs):
            axes.plot(
                [mark.generated for mark in run.marks],
                [mark.entries for mark in run.marks],
                label=run.method,
                color="black" if run.budget is None else [*COLORS, GREY][number - 1],
                dashes=DASHES[number % len(DASHES)],
            )
        axes.set(ylabel="entries of a KV head", ylim=(0, None))
        _finish(axes)


def draw_kl(rows: Sequence[AnswerDistance], path: Path) -> None:
    """Writes the picture: mean KL of each stretch after the first eviction, a line for a method."""
    own = [row for row in rows if row.budget == DRAWN]
    first = evicted(own[0]).start
    with picture(path, *SIZE) as drawn:
        axes = drawn.subplots()
        for number, method in enumerate(dict.fromkeys(row.method for row in own)):
            answers = [row.kl[first:] for row in own if row.method == method]
            means = [sum(stretch) / len(answers) for stretch in zip(*answers, strict=True)]
            random = method == "random"
            axes.plot(
                [STRETCH * (first + 1 + at) for at in range(len(means))],
                means,
                label=method.partition(":")[0],
                color=GREY if random else COLORS[number % len(COLORS)],
                dashes=BASELINE_DASH if random else DASHES[number // 2 % len(DASHES)],
            )
        axes.set(ylabel="KL to the full cache, nats per token", yscale="log")
        _finish(axes)


def tables() -> dict[str, str]:
    """What the page holds of each file of records."""
    distances = load_distances()
    answers = f"{table(*kl_table(distances))}\n\n{alike(distances)}"
    return {"runs.jsonl": runs_table(load("runs.jsonl")), "kl.jsonl": answers}


def main() -> None:
    draw(load("entries.jsonl"), OUT / PICTURE)
    draw_kl(load_distances(), OUT / KL_PICTURE)
    for name, made in tables().items():
        write_part(PAGE, BEGIN.format(name), made)


if __name__ == "__main__":
    main()
