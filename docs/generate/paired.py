# SPDX-License-Identifier: Apache-2.0
"""Paired difference between two methods on the published samples:

    python -m docs.generate.paired docs/results/bundled pyramidkv@0.2 snapkv@0.2 [--aware]
        [--task X] [--data TEXT] [--length N]

Scores are pooled over tasks as in `kvfold report`; perplexities are compared on one text. Intervals
are those of docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvfold.eval.tasks import tasks
from kvfold.evidence.estimates import IntervalEstimate, PairedDifference, of_perplexities, of_scores
from kvfold.evidence.intervals import Array, paired, pooled_pairs
from kvfold.methods.base import parse
from kvfold.report.headline import signed

FILE = "samples.csv.gz"


@dataclass(frozen=True)
class Unit:
    """A task at one length under one protocol, from one source of samples."""

    task: str
    length: str
    aware: bool
    data: str

    @property
    def scored(self) -> bool:
        """True if the task has a score, not a perplexity."""
        return tasks()[self.task].metric is not None

    def within(
        self, aware: bool, task: str | None, data: str | None = None, length: str | None = None
    ) -> bool:
        """True for a unit of the protocol, of `task`, a list, or a scored one, and so on."""
        named = self.scored if task is None else self.task in task.split(",")
        of_text = data in (None, self.data) and length in (None, self.length)
        return named and of_text and self.aware == aware


# Sample number → score and weight of each answer.
Cell = Mapping[int, list[tuple[float, float]]]
# Unit → "method@budget" → answers; the key of a method without budget is its name.
Samples = Mapping[Unit, Mapping[str, Cell]]


def load(folder: Path) -> Samples:
    """The published samples of `folder` that have an answer."""
    found: dict[Unit, dict[str, dict[int, list[tuple[float, float]]]]] = defaultdict(dict)
    with gzip.open(folder / FILE, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["error"]:
                continue
            unit = Unit(row["task"], row["length"], row["question_aware"] == "1", row["data"])
            name = f"{row['method']}@{row['budget']}" if row["budget"] else row["method"]
            weight = 1.0 if unit.scored else float(row["tokens"])
            answers = found[unit].setdefault(name, {}).setdefault(int(row["index"]), [])
            answers.append((float(row["score"]), weight))
    return found


def gap(
    samples: Samples,
    one: str,
    other: str,
    aware: bool = False,
    task: str | None = None,
    data: str | None = None,
    length: str | None = None,
) -> IntervalEstimate:
    """`one` minus `other`, pooled over the scored tasks, or over those of `task`, a list.

    `data`, `length`: of samples from this text, of this length in tokens, only. Raises SystemExit
    without samples of both, and for perplexities of several texts or lengths.
    """
    within = {u: cells for u, cells in samples.items() if u.within(aware, task, data, length)}
    found = differences(within, one, other)
    if not found:
        raise SystemExit(f"no samples of both {one} and {other}")
    return pooled(found)


def differences(samples: Samples, one: str, other: str) -> dict[Unit, PairedDifference]:
    """`one` minus `other` in each unit with samples of both."""
    return {
        unit: _difference(cells[one], cells[other], unit.scored)
        for unit, cells in samples.items()
        if one in cells and other in cells
    }


def pooled(found: Mapping[Unit, PairedDifference]) -> IntervalEstimate:
    """Mean over tasks, and in a task over its units.

    Raises SystemExit for perplexities of several texts or lengths.
    """
    pairs = [each.pair for each in found.values() if each.pair is not None]
    if len(pairs) < len(found):
        if len(found) > 1:
            texts = ", ".join(sorted({f"{unit.data} {unit.length}".strip() for unit in found}))
            raise SystemExit(f"perplexities have no mean over texts: name one by --data ({texts})")
        (each,) = found.values()
        assert each.low is not None and each.high is not None
        return IntervalEstimate(each.value, each.low, each.high)
    lengths = Counter(unit.task for unit in found)
    weights = [1 / (len(lengths) * lengths[unit.task]) for unit in found]
    return IntervalEstimate(*(100 * float(part) for part in paired(pooled_pairs(pairs, weights))))


def _difference(ours: Cell, theirs: Cell, scored: bool) -> PairedDifference:
    shared = [index for index in ours if index in theirs]
    (one, weights), (other, _) = _values(ours, shared), _values(theirs, shared)
    return of_scores(one - other, weights) if scored else of_perplexities(one, other, weights)


def _values(cell: Cell, indices: list[int]) -> tuple[Array, Array]:
    """Mean over each sample's answers `[n]`, and the samples' weights `[n]`."""
    answers = [np.array(cell[index]) for index in indices]
    means = [np.average(each[:, 0], weights=each[:, 1]) for each in answers]
    return np.array(means), np.array([each[:, 1].sum() for each in answers])


def written(of: IntervalEstimate) -> str:
    """A difference as text, in the format of the tables."""
    return f"{signed(of.value)} ({signed(of.low)} to {signed(of.high)})"


def published(named: str) -> str:
    """A cell's name as samples have it: presets are spelled out."""
    method, at, budget = named.partition("@")
    return f"{parse(method)}{at}{budget}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("one", type=published, help="method@budget")
    parser.add_argument("other", type=published, help="method@budget, or full")
    parser.add_argument("--aware", action="store_true", help="with the question in view")
    parser.add_argument("--task", help="one task, or a comma-separated list")
    parser.add_argument("--data", help="the text that samples were made of")
    parser.add_argument("--length", help="tokens of the samples' texts")
    given = parser.parse_args()
    chosen = given.one, given.other, given.aware, given.task, given.data, given.length
    print(written(gap(load(given.folder), *chosen)))


if __name__ == "__main__":
    main()
