# SPDX-License-Identifier: Apache-2.0
"""Picture and table of docs/answering-long.md: `python benchmarks/long_page.py`.

The records of `long_run.py` are docs/results/long/entries.jsonl for the picture, runs.jsonl for the
table. Equal records give equal files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from long_run import LongRun
from matplotlib.figure import Figure

from kvfold.jobs.records import RecordFile
from kvfold.report.style import COLORS, DASHES, GREY

ROOT = Path(__file__).parents[1]
PAGE, OUT = ROOT / "docs" / "answering-long.md", ROOT / "docs" / "results" / "long"
PICTURE = "entries.svg"
BEGIN, END = "<!-- made by benchmarks/long_page.py -->", "<!-- end -->"
HEAD = """\
| model | method | entries | answer, tokens | most bytes | bytes | late / early step |
|---|---|---|---|---|---|---|"""
LETTERS = 13  # points: 11 pixels where the picture is 390 pixels wide


def load(name: str) -> list[LongRun]:
    return RecordFile(OUT / name, LongRun).load().records


def table(runs: Sequence[LongRun]) -> str:
    """A row for each long answer."""
    return "\n".join([HEAD, *map(_row, runs)])


def _row(run: LongRun) -> str:
    most = max(mark.most_bytes for mark in run.marks)
    ratio = "" if run.late_over_early is None else f"{run.late_over_early:.2f}"
    flat = "flat" if run.flat else "grow"
    cells = [run.model, f"`{run.method}`", f"{run.budget}", f"{run.tokens:,}", f"{most:,}"]
    return f"| {' | '.join([*cells, flat, ratio])} |"


def page(text: str, runs: Sequence[LongRun]) -> str:
    """The page's `text` with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"{PAGE} lacks the lines {BEGIN} and {END}"
    return f"{before}{BEGIN}\n\n{table(runs)}\n\n{END}{after}"


def draw(runs: Sequence[LongRun], path: Path) -> None:
    """Writes the picture: entries of a head over the generated tokens, a line for each method."""
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "font.size": LETTERS}):
        drawn = Figure(figsize=(6.4, 5.4), layout="constrained")
        axes = drawn.subplots()
        for number, run in enumerate(runs):
            axes.plot(
                [mark.generated for mark in run.marks],
                [mark.entries for mark in run.marks],
                label=run.method,
                color="black" if run.budget is None else [*COLORS, GREY][number - 1],
                dashes=DASHES[number % len(DASHES)],
            )
        axes.set(xlabel="tokens of the answer", ylabel="entries of a KV head", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        drawn.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=LETTERS)
        drawn.savefig(path, metadata={"Date": None}, facecolor="white")


def main() -> None:
    draw(load("entries.jsonl"), OUT / PICTURE)
    PAGE.write_text(page(PAGE.read_text("utf-8"), load("runs.jsonl")), encoding="utf-8")


if __name__ == "__main__":
    main()
