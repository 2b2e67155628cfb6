# SPDX-License-Identifier: Apache-2.0
"""Picture and tables of docs/fleet.md: `python benchmarks/fleet_page.py`.

The records of `fleet.py` are in docs/results/fleet. Equal records give equal files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from fleet import MEMORIES, Run, Sized
from made_parts import with_part
from matplotlib.figure import Figure

from kvfold.jobs.records import RecordFile
from kvfold.report.style import COLORS, DASHES

ROOT = Path(__file__).parents[1]
PAGE, OUT = ROOT / "docs" / "fleet.md", ROOT / "docs" / "results" / "fleet"
PICTURE = "first-token.svg"
BEGIN = "<!-- made by benchmarks/fleet_page.py: {} -->"
SHOWN = 4.0  # requests a second, of the table
COLUMNS = ["model", "cache", "contexts a server", "from memory", "from files", "read again"]
COLUMNS += ["first token, median", "95 %", "busy", "work per request", "upload"]
LETTERS = 13


def load() -> tuple[list[Run], list[Sized]]:
    """All records."""
    runs = RecordFile(OUT / "runs.jsonl", Run).load().records
    return runs, RecordFile(OUT / "servers.jsonl", Sized).load().records


def table(runs: Sequence[Run]) -> str:
    """A row for each shape and deployment."""
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return "\n".join(head + [_row(run) for run in runs if run.rate == SHOWN])


def _row(run: Run) -> str:
    shares = [f"{each:.0%}" for each in (run.in_memory, run.loaded, run.prefilled)]
    times = ["" if each is None else f"{each:.2f} s" for each in (run.median, run.slowest)]
    if run.median is None:
        times[0] = f"{1 - run.finished:.0%} got none"
    upload = "" if run.deployment.stored is None else f"{run.upload:.1f} s"
    held = "" if not run.deployment.kept else f"{run.contexts:.0f}"
    work = [f"{run.busy:.0%}", f"{run.gpu_seconds:.2f} s", upload]
    cells = [run.shape.name, run.deployment.name, held, *shares, *times, *work]
    return f"| {' | '.join(cells)} |"


def fleets(found: Sequence[Sized]) -> str:
    """A row for each shape and deployment, with columns for each size of a GPU's memory."""
    sizes = [f"{memory / 1e9:.0f} GB" for memory in MEMORIES]
    each = ["contexts a server", "servers"]
    columns = ["model", "cache", *(f"{name}, {size}" for size in sizes for name in each)]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for shape, way in dict.fromkeys((one.shape, one.deployment) for one in found):
        own = [one for one in found if (one.shape, one.deployment) == (shape, way)]
        own.sort(key=lambda one: one.assumed.memory, reverse=True)
        cells = [shape.name, way.name, *(cell for one in own for cell in _sized(one))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _sized(one: Sized) -> list[str]:
    held = f"{one.contexts:.0f}" if one.deployment.kept else ""
    return [held, "none" if one.servers is None else f"{one.servers}"]


def compressing(runs: Sequence[Run]) -> str:
    """Operations of reading and compressing a document, over those of reading it."""
    found = {(run.shape.name, run.deployment.method): run.compressing for run in runs}
    methods = [name for name in dict.fromkeys(method for _, method in found) if name]
    lines = [f"| model | {' | '.join(methods)} |", "|---" * (len(methods) + 1) + "|"]
    for shape in dict.fromkeys(name for name, _ in found):
        cells = [f"{found[shape, method]:.4g}" for method in methods]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(text: str, runs: Sequence[Run], sized: Sequence[Sized]) -> str:
    """The page's `text` with the tables between their marks."""
    tables = {"runs": table(runs), "servers": fleets(sized), "compressing": compressing(runs)}
    for name, made in tables.items():
        text = with_part(text, BEGIN.format(name), f"\n{made}\n\n")
    return text


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
                    color=COLORS[number % len(COLORS)],
                    dashes=DASHES[number % len(DASHES)],
                    marker="o",
                )
            axes.set(xscale="log", yscale="log", title=shape.name)
            axes.set(xlabel="requests a second, of all servers", ylabel="first token, s (95 %)")
            axes.spines[["top", "right"]].set_visible(False)
        drawn.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=LETTERS)
        drawn.savefig(path, metadata={"Date": None}, facecolor="white")


def main() -> None:
    runs, sized = load()
    draw(runs, OUT / PICTURE)
    PAGE.write_text(page(PAGE.read_text("utf-8"), runs, sized), encoding="utf-8")


if __name__ == "__main__":
    main()
