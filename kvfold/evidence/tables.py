# SPDX-License-Identifier: Apache-2.0
"""Terminal tables, and numbers as they stand in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rich import box
from rich.console import RenderableType
from rich.table import Table


def table(
    title: str | None,
    *columns: str,
    right: Sequence[str] = (),
    rows: Iterable[Sequence[RenderableType]] = (),
) -> Table:
    """A table of `rows`; the first column never wraps, columns in `right` are right-aligned."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        made.add_column(column, justify=justify, no_wrap=column == columns[0], overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def size(count: int) -> str:
    """A number of bytes as text, in B, KiB, MiB, GiB or TiB."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{amount:.0f} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def seconds(duration: float) -> str:
    """A duration in seconds as text, in s or ms."""
    return f"{duration:.2f} s" if duration >= 1 else f"{duration * 1000:.1f} ms"
