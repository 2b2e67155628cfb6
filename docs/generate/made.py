# SPDX-License-Identifier: Apache-2.0
"""What the makers of pages share: places, tables, pictures, and parts of a page between marks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] | None = None
) -> str:
    """A Markdown table; all columns but those numbered `left` are to the right, if it is given."""
    every = range(len(columns))
    rule = ["---" if left is None or number in left else "---:" for number in every]
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


def with_parts(page: Path, maker: str, parts: Mapping[str, str]) -> str:
    """The text of `page` with what `maker`, a module of this folder, made; prose stays."""
    text = page.read_text("utf-8")
    for name, made in parts.items():
        text = with_part(text, f"<!-- made by docs/generate/{maker}.py: {name} -->", made)
    return text


def write_part(page: Path, begin: str, made: str) -> None:
    """Writes `page` with another part."""
    page.write_text(with_part(page.read_text("utf-8"), begin, made), encoding="utf-8")
