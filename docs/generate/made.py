# SPDX-License-Identifier: Apache-2.0
"""What the makers of pages share: places, tables, pictures, and parts of a page between marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
END = "<!-- end -->"
LETTERS = 13  # points: 11 pixels where a picture is 390 pixels wide


def row(*cells: str) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """A Markdown table. The first `left` columns are to the left, the others to the right."""
    right = 0 if left is None else len(columns) - left
    rule = ["---"] * (len(columns) - right) + ["---:"] * right
    return "\n".join(row(*cells) for cells in (columns, rule, *rows))


def and_list(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of so many inches, written to `path`; equal drawings give equal files."""
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "font.size": LETTERS}):
        drawn = Figure(figsize=(width, height), layout="constrained")
        yield drawn
        drawn.savefig(path, metadata={"Date": None}, facecolor="white")


def with_part(page: str, begin: str, made: str) -> str:
    """`page` with `made` from the line `begin` to the next end mark; ValueError without both."""
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise ValueError(f"the page lacks the lines {begin} and {END}")
    return f"{before}{begin}\n\n{made}\n\n{END}{after}"


def write_part(page: Path, begin: str, made: str) -> None:
    """Writes `page` with another part."""
    page.write_text(with_part(page.read_text("utf-8"), begin, made), encoding="utf-8")
