# SPDX-License-Identifier: Apache-2.0
"""Terminal tables of a run, 100 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvfold.bench.summary import BenchRow
from kvfold.evidence.estimates import Quartiles
from kvfold.evidence.tables import table

COLUMNS = ("first token", "x full", "ms/token", "x full ", "tok/s", "bytes", "peak")
NOTE = (
    "first token: seconds of prefill + compression; x full: median of rounds and quartiles, each "
    "against the full cache of its round; bytes and peak: x full; full again: the noise of the run"
)
ANSWERS = (
    "time of all generated tokens, rounds of eviction included: x full; x append: over the first "
    "method of the same budget that appends; largest: bytes, x those of budget + interval entries"
)

GRAPHS = (
    "seconds of the first compiled step, which makes a graph of a layer; later rows of one kind "
    "share it, and later processes find it on the disk"
)


def tables(rows: Sequence[BenchRow], against: str = "the full cache") -> list[Table]:
    """One table per cell, one of whole answers if a method evicts in rounds, one of graphs."""
    shown = []
    for cell in dict.fromkeys(row.cell for row in rows):
        of_cell = [row for row in rows if row.cell == cell]
        shown.append(_table(f"{cell}, against {against}", of_cell))
        if any(row.largest for row in of_cell):
            shown.append(_answers(f"{cell}, and an answer of {cell.new_tokens:,}", of_cell))
        compiled = [row for row in of_cell if row.graph_seconds is not None]
        if compiled:
            shown.append(_graphs(f"{cell}, the first graph", compiled))
    return shown


def _table(title: str, rows: Sequence[BenchRow]) -> Table:
    shown = _empty(title, f"{NOTE}; {_rounds(rows)}", COLUMNS)
    shown.padding = (0, 1, 0, 0)
    for column in shown.columns[1:]:
        column.no_wrap = not str(column.header).startswith("x full")
    for row in rows:
        shown.add_row(
            str(row.label),
            f"{row.prefill_seconds:.3g}+{row.compression_seconds:.2g}",
            spread(row.first_token),
            f"{row.seconds_per_token * 1000:.3g}",
            spread(row.per_token),
            rate(row.tokens_per_second),
            "-" if row.nbytes is None else f"{row.nbytes.median:.3f}",
            "-" if row.peak is None else f"{row.peak.median:.2f}",
        )
    return shown


def _answers(title: str, rows: Sequence[BenchRow]) -> Table:
    shown = _empty(title, f"{ANSWERS}; {_rounds(rows)}", ("x full", "x append", "largest"))
    for row in rows:
        shown.add_row(str(row.label), spread(row.answer), spread(row.append), spread(row.largest))
    return shown


def _graphs(title: str, rows: Sequence[BenchRow]) -> Table:
    shown = _empty(title, GRAPHS, ("seconds",))
    for row in rows:
        shown.add_row(str(row.label), f"{row.graph_seconds:.1f}")
    return shown


def _empty(title: str, caption: str, numbers: Sequence[str]) -> Table:
    """A table of participants, whose long names wrap."""
    shown = table(title, "method", *numbers, right=numbers)
    shown.pad_edge, shown.caption, shown.caption_justify = False, caption, "left"
    shown.columns[0].no_wrap, shown.columns[0].min_width = False, 10
    return shown


def spread(of: Quartiles | None) -> str:
    """Median and quartiles as text, for example "1.02 1.00-1.05"; "-" for None."""
    return "-" if of is None else f"{of.median:.2f} {of.low:.2f}-{of.high:.2f}"


def rate(per_second: float) -> str:
    """Tokens per second as text: whole numbers from 100 on, one decimal below."""
    return f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.1f}"


def _rounds(rows: Sequence[BenchRow]) -> str:
    counts = sorted({row.rounds for row in rows})
    low, high = counts[0], counts[-1]
    told = f"{low}" if low == high else f"{low} to {high}"
    return f"{told} {'round' if high == 1 else 'rounds'}"
