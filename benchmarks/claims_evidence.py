# SPDX-License-Identifier: Apache-2.0
"""Tests of claims: what is measured from which records, and the rule of the verdict."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import paired
from layers import FILE, LayerRecord
from scipy import stats

from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.cell_result import CellResult
from kvfold.eval.run.intervals import moments, student
from kvfold.jobs.records import RecordFile
from kvfold.report.load import load_results

RECORDS, LAYERS = "records.jsonl", "layers"
LAZY = 0.9  # attention to sinks and window above which a layer is lazy (SimLayerKV, Llama-3)


@dataclass(frozen=True)
class Measured:
    """A value with its 95 % interval, from `n` samples; operations have no interval."""

    value: float
    low: float
    high: float
    n: int
    digits: int = 1

    def __str__(self) -> str:
        value, low, high = (self._text(each) for each in (self.value, self.low, self.high))
        return value if self.low == self.high else f"{value} ({low} to {high})"

    def _text(self, value: float) -> str:
        return f"{value:.{self.digits}f}".replace("-", "−")


RuleKind = Literal["above", "below", "within", "beyond"]
Verdict = Literal["reproduced", "not reproduced", "not told apart"]


@dataclass(frozen=True)
class Rule:
    """Bounds of the whole interval: `above`, `below`, `within` ± or `beyond` ± a number."""

    kind: RuleKind
    than: float

    def __str__(self) -> str:
        sign = "± " if self.kind in ("within", "beyond") else ""
        return f"{self.kind} {sign}{self.than:g}".replace("-", "−")

    def verdict(self, of: Measured) -> Verdict:
        """Not told apart: the interval lies on both sides."""
        inside, outside = {
            "above": (of.low > self.than, of.high <= self.than),
            "below": (of.high < self.than, of.low >= self.than),
            "within": self._within(of),
            "beyond": self._within(of)[::-1],
        }[self.kind]
        return "reproduced" if inside else "not reproduced" if outside else "not told apart"

    def _within(self, of: Measured) -> tuple[bool, bool]:
        """True if the interval is inside ± `than`; if it is outside."""
        outside = of.low > self.than or of.high < -self.than
        return -self.than <= of.low and of.high <= self.than, outside


@dataclass(frozen=True)
class Better:
    """`one` minus `other` in points, or in perplexity, paired by sample."""

    folder: str
    one: str
    other: str
    aware: bool = False
    task: str | None = None

    def __str__(self) -> str:
        unit = "points" if self.task is None else self.task
        return f"`{self.one}` − `{self.other}`, {unit}"

    def measured(self, records: Path) -> Measured | None:
        if not (records / self.folder / paired.FILE).exists():
            return None
        samples = paired.load(records / self.folder)
        units = [
            cells
            for unit, cells in samples.items()
            if unit.aware == self.aware and {self.one, self.other} <= set(cells)
            if (unit.scored if self.task is None else unit.task == self.task)
        ]
        n = sum(len(set(cells[self.one]) & set(cells[self.other])) for cells in units)
        if n < 2:
            return None
        gap = paired.gap(samples, self.one, self.other, self.aware, self.task)
        return Measured(gap.value, gap.low, gap.high, n)


@dataclass(frozen=True)
class Kept:
    """Entries kept over entries seen: `one` on `task` less `other` on `other_task` (Welch)."""

    folder: str
    one: str
    other: str
    task: str
    other_task: str
    aware: bool = False

    def __str__(self) -> str:
        return f"kept: `{self.one}` on `{self.task}` − `{self.other}` on `{self.other_task}`"

    def measured(self, records: Path) -> Measured | None:
        mine = self._kept(records, self.one, self.task)
        theirs = self._kept(records, self.other, self.other_task)
        if min(len(mine), len(theirs)) < 2:
            return None
        found = stats.ttest_ind(mine, theirs, equal_var=False)
        value = float(np.mean(mine) - np.mean(theirs))
        low, high = found.confidence_interval(0.95)
        if math.isnan(low):  # neither varies
            low = high = value
        return Measured(value, float(low), float(high), len(mine) + len(theirs), 3)

    def _kept(self, records: Path, method: str, task: str) -> list[float]:
        """The part kept of each sample."""
        path = records / self.folder / paired.FILE
        if not path.exists():
            return []
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if not row["error"]]
        wanted = (task, method, str(int(self.aware)), "0")
        return [
            float(row["kept"])
            for row in rows
            if (row["task"], row["method"], row["question_aware"], row["turn"]) == wanted
        ]


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
        ratio = sum(mine / theirs for (mine, _), (theirs, _) in shared) / len(shared)
        return Measured(ratio, ratio, ratio, sum(n for (_, n), _ in shared), 2)

    @staticmethod
    def _of(results: Sequence[CellResult], name: str) -> dict[EvalCell, tuple[float, int]]:
        """Operations and number of samples of a method at its budget, by task and length."""
        method, _, budget = name.partition("@")
        return {
            result.cell.reference: (result.prefill_operations, result.samples)
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
        if len(passages) < 2:
            return None
        values = np.array(STATISTICS[self.statistic][1](passages))
        value, low, high = map(float, student(moments(values, np.ones(len(values)))))
        return Measured(value, low, high, len(values), 2)


Passages = Sequence[Sequence[LayerRecord]]


@cache
def _passages(path: Path) -> Passages:
    """Records of each passage, by layer."""
    found: dict[tuple[str, int], list[LayerRecord]] = {}
    for each in RecordFile(path, LayerRecord).load().records:
        found.setdefault((each.book, each.passage), []).append(each)
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
        "share of queries for which a layer is lazy, or not, as for the last one",
        _mean(lambda layer: layer.steady),
    ),
    "same": (
        "correlation (Spearman) of the layers' laziness with that in the other texts",
        _same,
    ),
    "kept_spread": ("difference in the part kept at 1 % between two texts", _kept_spread),
}  # fmt: skip
