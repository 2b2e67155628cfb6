# SPDX-License-Identifier: Apache-2.0
"""Picture and table of docs/fleet.md: `python benchmarks/fleet_page.py`.

The records of `fleet.py` are docs/results/fleet/runs.jsonl. Equal records give equal files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from fleet import Run
from matplotlib.figure import Figure

from kvfold.jobs.records import RecordFile
from kvfold.report.style import COLORS, DASHES

ROOT = Path(__file__).parents[1]
PAGE, OUT = ROOT / "docs" / "fleet.md", ROOT / "docs" / "results" / "fleet"
PICTURE = "first-token.svg"
BEGIN, END = "<!-- made by benchmarks/fleet_page.py -->", "<!-- end -->"
SHOWN = 4.0  # requests a second, of the table
COLUMNS = ["model", "cache", "contexts a server", "from memory", "from files", "read again"]
COLUMNS += ["first token, median", "95 %", "busy", "upload"]
LETTERS = 13


def load() -> list[Run]:
    """All records."""
    return RecordFile(OUT / "runs.jsonl", Run).load().records


def table(runs: Sequence[Run]) -> str:
    """A row for each shape and deployment."""
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join(head + [_row(run) for run in runs if run.rate == SHOWN])


def _row(run: Run) -> str:
    shares = [f"{each:.0%}" for each in (run.in_memory, run.loaded, run.prefilled)]
    times = ["none" if each is None else f"{each:.2f} s" for each in (run.median, run.slowest)]
    upload = "" if run.deployment.stored is None else f"{run.upload:.1f} s"
    held = "" if not run.deployment.kept else f"{run.contexts:.0f}"
    cells = [run.shape.name, run.deployment.name, held, *shares, *times, f"{run.busy:.0%}", upload]
    return f"| {' | '.join(cells)} |"


def page(text: str, runs: Sequence[Run]) -> str:
    """The page's `text` with the table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"{PAGE} lacks the lines {BEGIN} and {END}"
    return f"{before}{BEGIN}\n\n{table(runs)}\n\n{END}{after}"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Writes the picture: the 95th percentile of first tokens over the rate, shape by shape."""
    shapes = list(dict.fromkeys(run.shape for run in runs))
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "font.size": LETTERS}):
        drawn = Figure(figsize=(6.4, 3.6 * len(shapes)), layout="constrained")
        for shape, axes in zip(
            shapes, drawn.subplots(len(shapes), squeeze=False).flat, strict=True
        ):
            own = [run for run in runs if run.shape == shape]
            for number, name in enumerate(dict.fromkeys(run.deployment.name for run in own)):
                line = [r for r in own if r.deployment.name == name and r.slowest is not None]
                axes.plot(
                    [run.rate for run in line],
                    [run.slowest for run in line],
                    label=name if shape == shapes[0] else None,
                    color=COLORS[number],
                    dashes=DASHES[number % len(DASHES)],
                    marker="o",
                )
            axes.set(xscale="log", yscale="log", title=shape.name)
            axes.set(xlabel="requests a second, of all servers", ylabel="first token, s (95 %)")
            axes.spines[["top", "right"]].set_visible(False)
        drawn.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=LETTERS)
        drawn.savefig(path, metadata={"Date": None}, facecolor="white")


def main() -> None:
    runs = load()
    draw(runs, OUT / PICTURE)
    PAGE.write_text(page(PAGE.read_text("utf-8"), runs), encoding="utf-8")


if __name__ == "__main__":
    main()
