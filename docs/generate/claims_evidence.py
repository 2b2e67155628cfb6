# SPDX-License-Identifier: Apache-2.0
"""Tests of claims: what is measured from which records, and the rule of the verdict."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from scipy import stats

from docs.generate import paired
from docs.results.claims.measure_layers import FILE, LayerRecord
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.cell_result import CellResult
from kvfold.evidence.grouped import grouped
from kvfold.evidence.intervals import of_mean
from kvfold.evidence.records import RecordFile
from kvfold.report.load import load_results

RECORDS, LAYERS = "records.jsonl", "layers"
LAZY = 0.9  # attention to sinks and window above which a layer is lazy (SimLayerKV, Llama-3)
NOISE = 9  # digits behind which floats differ by the order of their sums
# What a task's scores are called; a difference over several tasks is of points.
UNITS = {
    "perplexity": "perplexity of a stream",
    "continuation": "perplexity after a prompt",
    "profile_form": "points of forms",
    "ruler_niah_single_1": "points in noise",
    "ruler_niah_single_2": "points in the novel",
}


def rounded(value: float, digits: int) -> str:
    """A number as text, halves away from zero, and zero without a sign."""
    exact = Decimal(f"{value:.{NOISE}f}")
    nearest = exact.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return str(nearest + 0).replace("-", "−")


@dataclass(frozen=True)
class Measured:
    """A value with its 95 % interval, from `n` samples; operations have neither."""

    value: float
    low: float
    high: float
    n: int | None = None
    digits: int = 1

    def __str__(self) -> str:
        numbers = self.value, self.low, self.high
        value, low, high = (rounded(each, self.digits) for each in numbers)
        return value if self.low == self.high else f"{value} ({low} to {high})"


def _mean_of(values: Sequence[float], digits: int) -> Measured | None:
    """The mean of values, with Student's interval; None of fewer than two."""
    if len(values) < 2:
        return None
    value, low, high = map(float, of_mean(np.array(values)))
    return Measured(value, low, high, len(values), digits)


RuleKind = Literal["above", "below", "within", "beyond"]
Verdict = Literal["reproduced", "not reproduced", "undecided"]


@dataclass(frozen=True)
class Rule:
    """Bounds of the whole interval: `above`, `below`, `within` or `beyond` `around` ± a number."""

    kind: RuleKind
    than: float
    around: float = 0

    def __str__(self) -> str:
        center = f"{self.around:g} " if self.around else ""
        sign = f"{center}± " if self.kind in ("within", "beyond") else ""
        return f"{self.kind} {sign}{self.than:g}".replace("-", "−")

    def verdict(self, of: Measured) -> Verdict:
        """Undecided: the interval lies on both sides."""
        inside, outside = {
            "above": (of.low > self.than, of.high <= self.than),
            "below": (of.high < self.than, of.low >= self.than),
            "within": self._within(of),
            "beyond": self._within(of)[::-1],
        }[self.kind]
        return "reproduced" if inside else "not reproduced" if outside else "undecided"

    def _within(self, of: Measured) -> tuple[bool, bool]:
        """True if the interval is inside `around` ± `than`; if it is outside."""
        least, most = self.around - self.than, self.around + self.than
        return least <= of.low and of.high <= most, of.low > most or of.high < least


@dataclass(frozen=True)
class Better:
    """`one` minus `other` in points, or in perplexity, paired by sample."""

    folder: str
    one: str
    other: str
    aware: bool = False
    task: str | None = None

    def __str__(self) -> str:
        unit = "points" if self.task is None else UNITS[self.task]
        return f"`{self.one}` − `{self.other}`, {unit}"

    def measured(self, records: Path) -> Measured | None:
        if not (records / self.folder / paired.FILE).exists():
            return None
        samples = paired.load(records / self.folder)
        units = {
            unit: cells
            for unit, cells in samples.items()
            if unit.aware == self.aware and {self.one, self.other} <= set(cells)
            if (unit.scored if self.task is None else unit.task == self.task)
        }
        n = sum(len(set(cells[self.one]) & set(cells[self.other])) for cells in units.values())
        if n < 2:
            return None
        gap = paired.gap(samples, self.one, self.other, self.aware, self.task)
        digits = 1 if all(unit.scored for unit in units) else 2
        return Measured(gap.value, gap.low, gap.high, n, digits)


def _parts_kept(folder: Path, method: str, aware: bool) -> dict[tuple[str, str], float]:
    """Entries kept over entries seen, by task and sample."""
    if not (folder / paired.FILE).exists():
        return {}
    wanted = (method, str(int(aware)), "0", "")
    columns = ("method", "question_aware", "turn", "error")
    with gzip.open(folder / paired.FILE, "rt", encoding="utf-8", newline="") as file:
        return {
            (row["task"], row["index"]): float(row["kept"])
            for row in csv.DictReader(file)
            if tuple(row[column] for column in columns) == wanted
        }


@dataclass(frozen=True)
class Kept:
    """The part kept with `one` less that with `other`, paired by sample over all tasks."""

    folder: str
    one: str
    other: str
    aware: bool = False

    def __str__(self) -> str:
        return f"`{self.one}` − `{self.other}`, part kept"

    def measured(self, records: Path) -> Measured | None:
        mine, theirs = (
            _parts_kept(records / self.folder, method, self.aware)
            for method in (self.one, self.other)
        )
        return _mean_of([mine[sample] - theirs[sample] for sample in mine if sample in theirs], 3)


@dataclass(frozen=True)
class KeptByTask:
    """The part kept on `task` less that on `other_task`, whose samples are others (Welch)."""

    folder: str
    method: str
    task: str
    other_task: str
    other_folder: str
    aware: bool = False

    def __str__(self) -> str:
        return f"`{self.method}` on `{self.task}` − on `{self.other_task}`, part kept"

    def measured(self, records: Path) -> Measured | None:
        mine, theirs = (
            [
                kept
                for (of, _), kept in _parts_kept(records / folder, self.method, self.aware).items()
                if of == task
            ]
            for folder, task in ((self.folder, self.task), (self.other_folder, self.other_task))
        )
        if min(len(mine), len(theirs)) < 2:
            return None
        found = stats.ttest_ind(mine, theirs, equal_var=False)
        value = float(np.mean(mine) - np.mean(theirs))
        low, high = found.confidence_interval(0.95)
        if math.isnan(low):  # neither varies
            low = high = value
        return Measured(value, float(low), float(high), len(mine) + len(theirs), 3)


@dataclass(frozen=True)
class Operations:
    """Operations of a prefill with `one`, compression included, over those with `other`."""

    folder: str
    one: str
    other: str

    def __str__(self) -> str:
        return f"operations of a prefill, `{self.one}` over `{self.other}`"

    def measured(self, records: Path) -> Measured | None:
        path = records / self.folder / RECORDS
        if not path.exists():
            return None
        results = load_results([path])
        one, other = (self._of(results, name) for name in (self.one, self.other))
        shared = [(one[cell], other[cell]) for cell in one if cell in other]
        if not shared:
            return None
        ratio = sum(mine / theirs for mine, theirs in shared) / len(shared)
        return Measured(ratio, ratio, ratio, digits=2)

    @staticmethod
    def _of(results: Sequence[CellResult], name: str) -> dict[EvalCell, float]:
        """Operations of a method at its budget, by task and length."""
        method, _, budget = name.partition("@")
        return {
            result.cell.reference: result.prefill_operations
            for result in results
            if (result.cell.method, result.cell.budget or "") == (method, budget)
            and result.prefill_operations
        }


@dataclass(frozen=True)
class Layers:
    """Mean over passages of a statistic over the layers; `STATISTICS` has them."""

    statistic: str

    def __str__(self) -> str:
        return STATISTICS[self.statistic][0]

    def measured(self, records: Path) -> Measured | None:
        passages = _passages(records / LAYERS / FILE)
        return _mean_of(STATISTICS[self.statistic][1](passages), 2) if passages[1:] else None


Passages = Sequence[Sequence[LayerRecord]]


@cache
def _passages(path: Path) -> Passages:
    """Records of each passage, by layer."""
    records = RecordFile(path, LayerRecord).load().records
    found = grouped(((each.book, each.passage), each) for each in records)
    return [sorted(layers, key=lambda each: each.layer) for layers in found.values()]


def _column(layers: Sequence[LayerRecord], name: str) -> list[float]:
    return [getattr(each, name) for each in layers]


def _trend(name: str) -> Callable[[Passages], list[float]]:
    """Spearman's correlation of a statistic with the layer, in each passage."""
    return lambda passages: [
        float(stats.spearmanr(range(len(layers)), _column(layers, name)).statistic)
        for layers in passages
    ]


def _mean(of: Callable[[LayerRecord], float]) -> Callable[[Passages], list[float]]:
    return lambda passages: [float(np.mean([of(layer) for layer in each])) for each in passages]


def _steady(passages: Passages, counted: Callable[[int, LayerRecord], bool]) -> list[float]:
    """Mean of `steady` over the layers that are `counted`, in each passage that has some."""
    found = [
        [layer.steady for n, layer in enumerate(each) if counted(n, layer)] for each in passages
    ]
    return [float(np.mean(each)) for each in found if each]


def _steady_of_lazy_layers(passages: Passages) -> list[float]:
    """Layers that are lazy in one passage or more: others stay as they are by definition."""
    sometimes = {n for each in passages for n, layer in enumerate(each) if layer.lazy > LAZY}
    return _steady(passages, lambda n, _: n in sometimes)


def _variances(passages: Passages) -> list[float]:
    """Largest over smallest variance of a layer, in each passage."""
    columns = [_column(layers, "variance") for layers in passages]
    return [max(column) / min(column) for column in columns]


def _same(passages: Passages) -> list[float]:
    """Spearman's correlation of each passage's laziness with the mean of the others'."""
    lazy = np.array([_column(layers, "lazy") for layers in passages])
    others = (lazy.sum(0) - lazy) / (len(lazy) - 1)
    return [float(stats.spearmanr(*each).statistic) for each in zip(lazy, others, strict=True)]


def _kept_spread(passages: Passages) -> list[float]:
    """Difference in the part kept within each pair of passages, the first and the second …"""
    kept = [float(np.mean(_column(layers, "kept"))) for layers in passages]
    return [abs(one - other) for one, other in zip(kept[::2], kept[1::2], strict=False)]


STATISTICS: dict[str, tuple[str, Callable[[Passages], list[float]]]] = {
    "narrows": (
        "correlation (Spearman) of the layer with the entries that a query attends to",
        _trend("attended"),
    ),
    "grows": (
        "correlation (Spearman) of the layer with the variance of its column sums",
        _trend("variance"),
    ),
    "variances": ("largest variance of a layer over the smallest", _variances),
    "lazy": (f"share of layers with more than {LAZY} of the attention on sinks and window",
             _mean(lambda layer: layer.lazy > LAZY)),
    "steady": (
        "layers ever lazy: share of queries for which they are, or not, as for the last one",
        _steady_of_lazy_layers,
    ),
    "steady_where_lazy": (
        "layers lazy for the last query: share of queries for which they are",
        lambda passages: _steady(passages, lambda _, layer: layer.lazy > LAZY),
    ),
    "same": (
        "correlation (Spearman) of the layers' laziness with that in the other texts",
        _same,
    ),
    "kept_spread": ("difference in the part kept at 1 % between two texts", _kept_spread),
}  # fmt: skip
