# SPDX-License-Identifier: Apache-2.0
"""docs/results/check: records of `docs/results/check/measure.py`, their picture and page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy import stats

from docs.generate.made import RESULTS, table, with_parts
from kvfold.evidence.grouped import grouped
from kvfold.methods.description import shortest
from kvfold.report.style import COLORS

OUT = RESULTS / "check"
CELLS, CERTIFIED, PAGE = "cells.jsonl", "certified.jsonl", "evidence.md"
PICTURE, ALL = "kl-against-points.svg", "all"
MEANS = ("kept", "mean_kl", "p99_kl", "agreement", "score", "lost")
MOST_LOST = 2.0  # points that a certified budget may lose
BELOW = 0.05  # nats: the mean KL of a certificate

EVERYTHING = 90.0  # points: cells that lose so many are also ranked alone
FEWEST = 5  # methods of an interval
SCORES = (
    "task", "tokens", "compressed", "prompts", "cells of methods", "Spearman (95 %)",
    "of those that lose 90", "lost at KL ≤ 0.05", "lost at KL > 0.05",
)  # fmt: skip
CERTIFICATES = (
    "task", "tokens", "compressed", "half", "methods certified in any split", "always hold",
    "method × split", "hold", "largest loss",
)  # fmt: skip
TEXTS = 0, 2  # of the columns


class Work(BaseModel):
    """A task at a length in tokens under a protocol."""

    model_config = ConfigDict(frozen=True)

    task: str
    length: int | None
    question_aware: bool


class Cell(Work):
    """A method at a budget: KL in nats and points lost, means over the prompts."""

    method: str
    budget: str | None
    prompts: int
    kept: float
    mean_kl: float
    p99_kl: float
    agreement: float
    score: float
    lost: float


class Certified(Work):
    """A budget certified on one half of the prompts, and points lost on the other half."""

    method: str
    budget: str | None
    split: int
    lost: float


def write(cells: Sequence[Cell], certified: Sequence[Certified], out: Path = OUT) -> None:
    """Writes records, picture and page; equal records give equal files.

    Earlier records of tasks and protocols that are not among `cells` stay.
    """
    out.mkdir(parents=True, exist_ok=True)
    if (out / CELLS).exists():
        works = {_work(each) for each in cells}
        before, split = load(out)
        cells = [*(each for each in before if _work(each) not in works), *cells]
        certified = [*(each for each in split if _work(each) not in works), *certified]
    for name, records in ((CELLS, cells), (CERTIFIED, certified)):
        (out / name).write_text("".join(f"{_short(each)}\n" for each in records))
    cells, certified = load(out)  # as rounded
    with matplotlib.rc_context({"svg.hashsalt": PICTURE}):
        picture(cells).savefig(out / PICTURE, metadata={"Date": None}, facecolor="white")
    (out / PAGE).write_text(text(cells, certified))


def load(out: Path = OUT) -> tuple[list[Cell], list[Certified]]:
    """The records as written."""
    cells = [Cell.model_validate_json(line) for line in (out / CELLS).read_text().splitlines()]
    lines = (out / CERTIFIED).read_text().splitlines()
    return cells, [Certified.model_validate_json(line) for line in lines]


def text(cells: Sequence[Cell], certified: Sequence[Certified]) -> str:
    """The page, whose prose is written by hand, with the tables of these records."""
    splits = _by_work(certified)
    scores = [
        [*_named(work), *_correlated(own)]
        for part in (cells, pooled(cells))
        for work, own in _by_work(part).items()
    ]
    held = [
        [*_named(work), *_confirmed(splits.get(work, []), own)]
        for work, own in _by_work(cells).items()
    ]
    parts = {
        "scores": table(SCORES, scores, TEXTS),
        "certificates": "\n\n".join([table(CERTIFICATES, held, TEXTS), *_rarely(splits)]),
    }
    return with_parts(OUT / PAGE, "check_page", parts)


def picture(cells: Sequence[Cell]) -> Figure:
    """Points lost against mean KL, both protocols side by side."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    titles = ("before the question is known", "with the question in view")
    tasks = list(dict.fromkeys(each.task for each in cells))
    for panel, aware, title in zip(panels, (False, True), titles, strict=True):
        for work, own in _by_work(cells).items():
            if work.question_aware == aware:
                kl = [max(each.mean_kl, 1e-6) for each in own]
                number = tasks.index(work.task)
                style = {"color": COLORS[number % len(COLORS)], "marker": "os^Dv"[number % 5]}
                lost = [each.lost for each in own]
                panel.scatter(kl, lost, s=14, alpha=0.7, label=work.task, **style)
        panel.set_xscale("log")
        panel.axvline(BELOW, color="#888888", linewidth=1, linestyle="--")
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlabel("mean KL, nats per token")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("points lost")
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def pooled(cells: Sequence[Cell]) -> list[Cell]:
    """Cells under each protocol that were measured on all of its tasks, as means over these."""
    found = []
    for aware in (False, True):
        under = [each for each in cells if each.question_aware == aware]
        tasks = len({_work(each) for each in under})
        for at in dict.fromkeys((each.method, each.budget) for each in under):
            own = [each for each in under if (each.method, each.budget) == at]
            if tasks > 1 and len(own) == tasks:
                means = {
                    name: float(np.mean([getattr(each, name) for each in own])) for name in MEANS
                }
                means["prompts"] = sum(each.prompts for each in own)
                found.append(own[0].model_copy(update={"task": ALL, "length": None} | means))
    return found


def spearman(cells: Sequence[Cell]) -> tuple[float, float, float]:
    """Rank correlation of KL and lost points, with its interval, bootstrapped over methods."""
    names = list(dict.fromkeys(each.method for each in cells))
    own = [np.array([_values(each) for each in cells if each.method == name]) for name in names]
    drawn = np.random.default_rng(0).integers(len(own), size=(1000, len(own)))
    found = [_rank_correlation(np.concatenate([own[n] for n in row])) for row in drawn]
    low, high = np.nanquantile(found, (0.025, 0.975))
    return _rank_correlation(np.concatenate(own)), float(low), float(high)


def _values(cell: Cell) -> tuple[float, float]:
    return cell.mean_kl, cell.lost


def _rank_correlation(values: NDArray[np.float64]) -> float:
    """NaN if either column is constant."""
    if len(values) < 2 or (values == values[0]).all(0).any():
        return float("nan")
    return float(stats.spearmanr(*values.T).statistic)


def _correlated(cells: Sequence[Cell]) -> list[str]:
    value, low, high = spearman(cells)
    methods = len({each.method for each in cells})
    interval = f" ({low:.2f} to {high:.2f})" if methods >= FEWEST else ""
    much = [_values(each) for each in cells if each.lost >= EVERYTHING]
    among = f"{_rank_correlation(np.array(much)):.2f} ({len(much)})" if len(much) > 2 else ""
    within = [each.lost for each in cells if each.mean_kl <= BELOW]
    above = [each.lost for each in cells if each.mean_kl > BELOW]
    lost = [f"{np.mean(each):.1f} ({len(each)})" if each else "" for each in (within, above)]
    counts = [str(cells[0].prompts), f"{len(cells)} of {methods}"]
    return [*counts, *_signed([f"{value:.2f}{interval}", among.replace("nan", "–"), *lost])]


def _confirmed(certified: Sequence[Certified], cells: Sequence[Cell]) -> list[str]:
    methods, half = len({each.method for each in cells}), -(-cells[0].prompts // 2)
    if not certified:
        return [f"{half}", f"0 of {methods}", "", "0", "", ""]
    lost = [each.lost for each in certified]
    held = np.mean([each <= MOST_LOST for each in lost])
    shares = _held(certified)
    always = sum(share == 1 for share in shares.values())
    counts = [f"{half}", f"{len(shares)} of {methods}", f"{always} of {len(shares)}"]
    return [*counts, str(len(lost)), *_signed([f"{held:.1%}", f"{max(lost):.1f}"])]


def _held(certified: Sequence[Certified]) -> dict[str, float]:
    """The share of a method's certificates that hold."""
    found = grouped((each.method, each.lost <= MOST_LOST) for each in certified)
    return {name: float(np.mean(held)) for name, held in found.items()}


def _rarely(splits: Mapping[Work, Sequence[Certified]]) -> Iterator[str]:
    """Methods that do not always hold, the worst first, task by task."""
    for work, certified in splits.items():
        worst = sorted((share, name) for name, share in _held(certified).items() if share < 1)
        if worst:
            told = ", ".join(f"`{shortest(name)}` {share:.0%}" for share, name in worst)
            yield f"{', '.join(_named(work))}, not always: {told}."


W = TypeVar("W", bound=Work)


def _by_work(each: Iterable[W]) -> dict[Work, list[W]]:
    return grouped((_work(one), one) for one in each)


def _work(of: Work) -> Work:
    return Work(task=of.task, length=of.length, question_aware=of.question_aware)


def _named(work: Work) -> tuple[str, str, str]:
    how = "with the question" if work.question_aware else "before it is known"
    task = "all tasks" if work.task == ALL else f"`{work.task}`"
    return task, f"{work.length or ''}", how


def _signed(numbers: Sequence[str]) -> list[str]:
    return [number.replace("-", "−") for number in numbers]


def _short(record: Work) -> str:
    """A line of JSON with numbers of five digits."""
    shorten: Callable[[re.Match[str]], str] = lambda match: f"{float(match[0]):.5g}"  # noqa: E731
    return re.sub(r"\d+\.\d{5,}(e-\d+)?", shorten, record.model_dump_json())
