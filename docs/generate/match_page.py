# SPDX-License-Identifier: Apache-2.0
"""Picture and tables of docs/results/match/README.md: `python -m docs.generate.match_page`.

The records of `match_grid.sh` are docs/results/match/rows.jsonl. Equal records give equal files.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from docs.generate.made import LETTERS, RESULTS, picture, table, write_part
from docs.results.match.measure import Row
from kvfold.evidence.grouped import grouped
from kvfold.evidence.records import RecordFile
from kvfold.report.style import COLORS, DASHES

Array = NDArray[np.float64]

OUT = RESULTS / "match"
PAGE = OUT / "README.md"
PICTURE = "kl-against-bytes.svg"
BEGIN = "<!-- made by docs/generate/match_page.py: {} -->"
BASE = "kvzip"
TARGETS = {0.2: 0.45, 0.1: 0.5, 0.05: 0.65, 0.02: 0.85}  # of KL beside `BASE`
RMS = "kvzip:score=rms,floor=0.25"
CORE = [BASE, f"{BASE} + match", RMS, f"{RMS} + match"]
SHOWN = [
    BASE, f"{RMS} + match", "snapkv", "snapkv + match", "kvzip_plus", "kvzip_plus + match",
    f"{BASE} + kivi:bits=4", f"{BASE} + turboquant_3bit",
]  # fmt: skip
COLUMNS = ["method", "KL", "× kvzip (95 %)", "× kvzip, equal bytes", "lower KL, equal budget"]
COLUMNS += ["needles", "kvzip's", "MB", "× operations"]
BEYOND = 1.05  # × bytes beyond a method's own budgets, up to which its KL is interpolated
DRAWS = 10_000
Passage = tuple[str, int, int]


def load() -> list[Row]:
    """All records."""
    return RecordFile(OUT / "rows.jsonl", Row).load().records


@dataclass(frozen=True)
class Pairs:
    """Rows of a method at one budget, and those of `BASE` on the same passages."""

    own: list[Row]
    base: list[Row]

    @classmethod
    def of(cls, rows: Iterable[Row], method: str, kept: float) -> Pairs:
        """Pairs of the passages that both have."""
        of_budget = [row for row in rows if row.kept == kept]
        base = {row.passage: row for row in of_budget if row.method == BASE}
        own = [row for row in of_budget if row.method == method and row.passage in base]
        return cls(own, [base[row.passage] for row in own])

    def ratio(self, kl: Sequence[float] | None = None) -> float:
        """Mean KL, or that of other numbers `kl`, over that of `BASE`."""
        own = [row.kl for row in self.own] if kl is None else kl
        return float(np.mean(own) / np.mean([row.kl for row in self.base]))

    def mean(self, field: str) -> float:
        """Mean of a field of `Row`."""
        return float(np.mean([getattr(row, field) for row in self.own]))

    def interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the ratio; books are drawn, with all of their passages."""
        sums: dict[str, Array] = defaultdict(lambda: np.zeros(2))
        for row, other in zip(self.own, self.base, strict=True):
            sums[row.text] += row.kl, other.kl
        books = np.stack([sums[name] for name in sorted(sums)])
        draws = np.random.default_rng(0).integers(len(books), size=(DRAWS, len(books)))
        own, base = books[draws].sum(1).T
        low, high = np.quantile(own / base, [0.025, 0.975])
        return float(low), float(high)


def at_bytes(points: Iterable[tuple[float, float]], nbytes: float) -> float:
    """KL at `nbytes`, log-linear between a method's `(bytes, KL)`; beyond, as at the end."""
    x, y = np.log(np.array(sorted(points))).T
    at = np.log(nbytes)
    right = int(np.clip(np.searchsorted(x, at), 1, len(x) - 1))
    slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
    return float(np.exp(y[right] + slope * (at - x[right])))


def at_equal_bytes(rows: Sequence[Row], method: str, kept: float) -> list[float]:
    """KL of each passage, where the method takes the bytes that `BASE` has at `kept`.

    Empty where that is beyond its own budgets.
    """
    own = (row for row in rows if row.method == method)
    curves = grouped((row.passage, (row.nbytes, row.kl)) for row in own)
    pairs = Pairs.of(rows, method, kept)
    for row in pairs.base:
        sizes = [size for size, _ in curves[row.passage]]
        if not min(sizes) / BEYOND <= row.nbytes <= max(sizes) * BEYOND:
            return []
    return [at_bytes(curves[row.passage], row.nbytes) for row in pairs.base]


def measured(rows: Sequence[Row], wanted: Sequence[str]) -> list[Row]:
    """Rows of the methods, on the passages that all of them have at every budget."""
    kept = len({row.kept for row in rows})
    found = Counter(row.passage for row in rows if row.method in wanted)
    whole = {passage for passage, count in found.items() if count == kept * len(wanted)}
    order = {name: number for number, name in enumerate(wanted)}
    own = [row for row in rows if row.method in order and row.passage in whole]
    return sorted(own, key=lambda row: order[row.method])


def budgets(rows: Iterable[Row]) -> list[float]:
    """All budgets, the largest first."""
    return sorted({row.kept for row in rows}, reverse=True)


def core(rows: Sequence[Row]) -> str:
    """A table of the methods that are run on all passages, for each budget."""
    return _tables(measured(rows, CORE))


def beside(rows: Sequence[Row]) -> str:
    """A table of all methods for each budget, on the passages that they share; "" without any."""
    own = measured(rows, list(dict.fromkeys([*CORE, *sorted({row.method for row in rows})])))
    same = {row.method for row in own} == set(CORE)
    return "" if same else _tables(own)


def _tables(rows: Sequence[Row]) -> str:
    texts = len({row.passage for row in rows})
    return "\n\n".join(
        f"Kept {kept:g}, {texts} passages:\n\n{_table(rows, kept)}" for kept in budgets(rows)
    )


def _table(rows: Sequence[Row], kept: float) -> str:
    names = dict.fromkeys(row.method for row in rows)
    return table(COLUMNS, [_row(rows, name, kept) for name in names])


def _row(rows: Sequence[Row], method: str, kept: float) -> list[str]:
    pairs, equal = Pairs.of(rows, method, kept), at_equal_bytes(rows, method, kept)
    own, base = pairs.own, pairs.base
    low, high = pairs.interval()
    same = method == BASE
    lower = sum(row.kl < other.kl for row, other in zip(own, base, strict=True))
    return [
        f"`{named(method)}`",
        f"{pairs.mean('kl'):.3f}",
        "1" if same else f"{pairs.ratio():.2f} ({low:.2f} to {high:.2f})",
        "1" if same else f"{pairs.ratio(equal):.2f}" if equal else "–",
        "" if same else f"{lower}",
        *needles(own, base),
        f"{pairs.mean('nbytes') / 1e6:.2f}",
        f"{mean_ratio(own, base, 'operations'):.2f}",
    ]


def named(method: str) -> str:
    """A method's name without its fitted file."""
    return re.sub(r":file=\S+", "", method)


def needles(own: Sequence[Row], base: Sequence[Row]) -> list[str]:
    """Right answers of all asked, and those of `BASE`."""
    right, other = (sum(row.right for row in rows) for rows in (own, base))
    return [f"{right} of {sum(row.asked for row in own)}", f"{other}"]


def mean_ratio(own: Sequence[Row], base: Sequence[Row], field: str) -> float:
    """Mean over passages of the ratio of a field of `Row`."""
    pairs = zip(own, base, strict=True)
    return float(np.mean([getattr(row, field) / getattr(other, field) for row, other in pairs]))


def targets(rows: Sequence[Row]) -> str:
    """Gains of `match` over plain `BASE`, at equal entries and at equal bytes."""
    columns = ["kept", "method", "× KL, equal entries", "× KL, equal bytes", "wanted"]
    columns += ["lower KL, equal bytes", "needles", "kvzip's"]
    return table(columns, [*_targets(measured(rows, CORE))])


def _targets(rows: Sequence[Row]) -> Iterator[list[str]]:
    for kept, wanted in TARGETS.items():
        for method in (CORE[1], CORE[3]):
            pairs, equal = Pairs.of(rows, method, kept), at_equal_bytes(rows, method, kept)
            lower = sum(kl < row.kl for kl, row in zip(equal, pairs.base, strict=True))
            cells = [f"{kept:g}", f"`{method}`", f"{pairs.ratio():.2f}"]
            cells += [f"{pairs.ratio(equal):.2f}", f"{wanted:g}", f"{lower} of {len(equal)}"]
            yield cells + needles(pairs.own, pairs.base)


TABLES = {"targets": targets, "core": core, "beside": beside}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the picture: mean KL over mean bytes, of few methods and of more on fewer passages."""
    panels = [own for own in (measured(rows, CORE), measured(rows, SHOWN)) if own]
    with picture(path, 6.4, 6.2 * len(panels)) as drawn:
        for axes, own in zip(drawn.subplots(len(panels), squeeze=False).flat, panels, strict=True):
            _panel(axes, own)


def _panel(axes: Axes, rows: Sequence[Row]) -> None:
    for number, name in enumerate(dict.fromkeys(row.method for row in rows)):
        own = [row for row in rows if row.method == name]
        line = [[row for row in own if row.kept == kept] for kept in budgets(own)]
        axes.plot(
            [np.mean([row.nbytes for row in each]) / 1e6 for each in line],
            [np.mean([row.kl for row in each]) for each in line],
            label=name,
            color=COLORS[number % len(COLORS)],
            dashes=DASHES[number % len(DASHES)],
            marker="o",
        )
    texts = len({row.passage for row in rows})
    axes.set(xscale="log", yscale="log", title=f"{texts} texts")
    axes.set(xlabel="MB of the cache", ylabel="KL to the full cache")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, fontsize=LETTERS)


def main() -> None:
    rows = load()
    draw(rows, OUT / PICTURE)
    for name, made in TABLES.items():
        write_part(PAGE, BEGIN.format(name), made(rows))


if __name__ == "__main__":
    main()
