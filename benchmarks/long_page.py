# SPDX-License-Identifier: Apache-2.0
"""Pictures and tables of docs/answering-long.md: `python benchmarks/long_page.py`.

The records of `long_run.py` are docs/results/long/entries.jsonl for the picture, runs.jsonl for the
table; those of `long_answers_kl.py` are kl.jsonl for both. Equal records give equal files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import numpy as np
from long_answers_kl import STRETCH, AnswerDistance
from long_run import LongRun
from made_parts import with_part
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvfold.evidence.intervals import Array, Interval, of_mean
from kvfold.evidence.records import RecordFile
from kvfold.report.style import BASELINE_DASH, COLORS, DASHES, GREY

ROOT = Path(__file__).parents[1]
PAGE, OUT = ROOT / "docs" / "answering-long.md", ROOT / "docs" / "results" / "long"
PICTURE, KL_PICTURE = "entries.svg", "kl.svg"
BEGIN = "<!-- made by benchmarks/long_page.py of {} -->"
HEAD = """\
| model | method | entries | answer, tokens | most bytes | bytes | late / early step |
|---|---|---|---|---|---|---|"""
LETTERS = 13  # points: 11 pixels where the picture is 390 pixels wide
DRAWN = 256  # entries of the answer, in the picture of the KL


def load(name: str) -> list[LongRun]:
    return RecordFile(OUT / name, LongRun).load().records


def load_distances() -> list[AnswerDistance]:
    return RecordFile(OUT / "kl.jsonl", AnswerDistance).load().records


def table(runs: Sequence[LongRun]) -> str:
    """A row for each long answer."""
    return "\n".join([HEAD, *map(_row, runs)])


def _row(run: LongRun) -> str:
    most = max(mark.most_bytes for mark in run.marks)
    ratio = "" if run.late_over_early is None else f"{run.late_over_early:.2f}"
    flat = "flat" if run.flat else "grow"
    cells = [run.model, f"`{run.method}`", f"{run.budget}", f"{run.tokens:,}", f"{most:,}"]
    return f"| {' | '.join([*cells, flat, ratio])} |"


def evicted(row: AnswerDistance) -> slice:
    """The stretches of an answer that come after the first eviction."""
    first = (row.budget // row.interval + 1) * row.interval
    return slice(first // STRETCH, None)


def kl_table(rows: Sequence[AnswerDistance]) -> str:
    """A row for each method, a pair of columns for each budget; by the KL at the first one."""
    budgets, methods = (list(dict.fromkeys(of)) for of in zip(*_cells(rows), strict=True))
    lines = {method: f"| `{method}` |" for method in methods}
    head, rule = "| method |", "|---|"
    order: dict[str, float] = {}
    for budget in budgets:
        counts = {sum(_cell(row) == (budget, method) for row in rows) for method in methods}
        assert len(counts) == 1, f"methods at {budget} have answers of their own"
        head += f" KL at {budget}, n = {counts.pop()} | same token |"
        rule += "---|---|"
        for method in methods:
            own = [row for row in rows if _cell(row) == (budget, method)]
            kl = of_mean(_means([row.kl for row in own], own))
            agrees = np.mean(_means([row.agrees for row in own], own))
            order.setdefault(method, float(kl.value))
            lines[method] += f" {kl.value:.3f} ({max(kl.low, 0):.3f} to {kl.high:.3f}) |"
            lines[method] += f" {agrees:.1%} |"
    return "\n".join(
        [head, rule, *(lines[name] for name in sorted(methods, key=order.__getitem__))]
    )


def ranked(rows: Sequence[AnswerDistance]) -> list[str]:
    """Methods by their KL at the smallest budget."""
    means = {method: np.mean(_means([row.kl for row in own], own)) for method, own in _least(rows)}
    return sorted(means, key=means.__getitem__)


def alike(rows: Sequence[AnswerDistance]) -> str:
    """The method of the lowest KL at the smallest budget, and those not told apart from it."""
    first, *others = ranked(rows)
    own = dict(_least(rows))
    same = [name for name in others if _apart(own[name], own[first]).low <= 0]
    told = f", which {len(own[first])} answers do not tell apart from "
    names = told + ", ".join(f"`{name}`" for name in same) if same else ""
    return f"Lowest KL at {own[first][0].budget} entries: `{first}`{names}."


def _least(rows: Sequence[AnswerDistance]) -> list[tuple[str, list[AnswerDistance]]]:
    """Methods with their rows at the smallest budget."""
    least = [row for row in rows if row.budget == min(row.budget for row in rows)]
    names = dict.fromkeys(row.method for row in least)
    return [(name, [row for row in least if row.method == name]) for name in names]


def _apart(one: list[AnswerDistance], other: list[AnswerDistance]) -> Interval:
    """Mean difference of the KL on the same answers, with its interval."""
    base = {row.answer: row for row in other}
    theirs = [base[row.answer] for row in one]
    ours = _means([row.kl for row in one], one)
    return of_mean(ours - _means([row.kl for row in theirs], theirs))


def _cell(row: AnswerDistance) -> tuple[int, str]:
    return row.budget, row.method


def _cells(rows: Sequence[AnswerDistance]) -> list[tuple[int, str]]:
    return list(dict.fromkeys(map(_cell, rows)))


def _means(numbers: Sequence[Sequence[float]], rows: Sequence[AnswerDistance]) -> Array:
    """Means of each answer's stretches after the first eviction."""
    after = [each[evicted(row)] for each, row in zip(numbers, rows, strict=True)]
    return np.array([np.mean(stretches) for stretches in after])


def page(text: str, tables: dict[str, str]) -> str:
    """The page's `text` with the tables, by the name of their records, between their marks."""
    for name, made in tables.items():
        text = with_part(text, BEGIN.format(name), f"\n{made}\n\n")
    return text


@contextmanager
def picture(path: Path) -> Iterator[Axes]:
    """Axes of one picture, over the tokens of an answer, that is written to `path`."""
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "font.size": LETTERS}):
        drawn = Figure(figsize=(6.4, 5.4), layout="constrained")
        axes = drawn.subplots()
        yield axes
        axes.set(xlabel="tokens of the answer")
        axes.spines[["top", "right"]].set_visible(False)
        drawn.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=LETTERS)
        drawn.savefig(path, metadata={"Date": None}, facecolor="white")


def draw(runs: Sequence[LongRun], path: Path) -> None:
    """Writes the picture: entries of a head over the generated tokens, a line for each method."""
    with picture(path) as axes:
        for number, run in enumerate(runs):
            axes.plot(
                [mark.generated for mark in run.marks],
                [mark.entries for mark in run.marks],
                label=run.method,
                color="black" if run.budget is None else [*COLORS, GREY][number - 1],
                dashes=DASHES[number % len(DASHES)],
            )
        axes.set(ylabel="entries of a KV head", ylim=(0, None))


def draw_kl(rows: Sequence[AnswerDistance], path: Path) -> None:
    """Writes the picture: mean KL of each stretch after the first eviction, a line for a method."""
    own = [row for row in rows if row.budget == DRAWN]
    first = evicted(own[0]).start
    with picture(path) as axes:
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


def tables() -> dict[str, str]:
    """What the page holds of each file of records."""
    distances = load_distances()
    answers = f"{kl_table(distances)}\n\n{alike(distances)}"
    return {"runs.jsonl": table(load("runs.jsonl")), "kl.jsonl": answers}


def main() -> None:
    draw(load("entries.jsonl"), OUT / PICTURE)
    draw_kl(load_distances(), OUT / KL_PICTURE)
    PAGE.write_text(page(PAGE.read_text("utf-8"), tables()), encoding="utf-8")


if __name__ == "__main__":
    main()
