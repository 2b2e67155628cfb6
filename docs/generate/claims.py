# SPDX-License-Identifier: Apache-2.0
"""The page on the papers' claims, from the records: `python -m docs.generate.claims`.

`docs/results/claims/claims.toml` lists the claims, `docs/results/claims/run.sh` makes the records
of docs/results/claims, and this writes what docs/claims.md says of them, between its marks.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from matplotlib.axes import Axes

import kvfold
from docs.generate import claims_evidence as kinds
from docs.generate.made import DOCS, LETTERS, RESULTS, picture, table, with_parts
from kvfold.eval.run.cell import TRUNCATED
from kvfold.eval.run.cell_result import CellResult
from kvfold.evidence.pictures import legend_below
from kvfold.report.load import load_results
from kvfold.report.style import COLORS, GREY

RECORDS, PAGE = RESULTS / "claims", DOCS / "claims.md"
CLAIMS, RUN = RECORDS / "claims.toml", "docs/results/claims/run.sh"
Evidence = kinds.Better | kinds.Layers | kinds.Kept | kinds.KeptByTask | kinds.Operations
KINDS: dict[str, type[Evidence]] = {
    "better": kinds.Better,
    "layers": kinds.Layers,
    "kept": kinds.Kept,
    "kept_by_task": kinds.KeptByTask,
    "operations": kinds.Operations,
}
RULES: tuple[kinds.RuleKind, ...] = ("above", "below", "within", "beyond")
LAYERS_STEP = "layers"
CURVES = "thresholds.svg"
# Folder of the records, and the method whose threshold changes in them.
CURVED = {"simlayerkv": "simlayerkv:window=128", "dbudgetkv": "dbudgetkv"}
TITLES = {"simlayerkv": "SimLayerKV", "dbudgetkv": "DBudgetKV"}
COLUMNS = "claim", "test", "result (95 %)", "n", "verdict"
NOT_RUN, OUT_OF_REACH, IN_PART = "not run yet", "out of reach here", "in part"
VERDICTS = ("reproduced", IN_PART, "undecided", "not reproduced", NOT_RUN, OUT_OF_REACH)
NO_BUDGET = "no budget"
COMMAND = """\
```
make real
STEPS="{steps}" docs/results/claims/run.sh BOOK BOOKS
python -m docs.generate.claims
```"""


@dataclass(frozen=True)
class Test:
    """A measurement and the rule of its verdict."""

    evidence: Evidence
    rule: kinds.Rule
    after: bool = False  # newer than the run

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Test:
        """A test as `claims.toml` writes it; raises ValueError without exactly one rule."""
        around = given.get("around", 0)
        rules = [kinds.Rule(kind, given[kind], around) for kind in RULES if kind in given]
        if len(rules) != 1:
            raise ValueError(f"a test has one of {', '.join(RULES)}: {given}")
        own = {"kind", "around", "after", *RULES}
        options = {name: value for name, value in given.items() if name not in own}
        return cls(KINDS[given["kind"]](**options), rules[0], given.get("after", False))

    def __str__(self) -> str:
        return f"{self.evidence}: {self.rule}{' †' if self.after else ''}"

    def outcome(self, records: Path) -> tuple[kinds.Measured | None, str]:
        """The measurement, if there is one, and the verdict."""
        measured = self.evidence.measured(records)
        return measured, self.rule.verdict(measured) if measured else NOT_RUN

    @property
    def steps(self) -> list[str]:
        """The steps of `claims.sh` that make the records."""
        names = ("folder", "other_folder")
        found = [getattr(self.evidence, name) for name in names if hasattr(self.evidence, name)]
        return found or [LAYERS_STEP]


@dataclass(frozen=True)
class Claim:
    """A paper's claim: its tests, or what a test here would need."""

    system: str
    says: str
    source: str
    tests: tuple[Test, ...] = ()
    unreachable: str = ""
    best: bool = False  # that something is the best: one lost test refutes it
    why: str = ""  # why it was not reproduced, as far as known
    note: str = ""  # what a reader of any verdict should know

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Claim:
        tests = tuple(map(Test.of, given.get("tests", ())))
        claim = cls(**{**given, "tests": tests})
        if bool(claim.tests) == bool(claim.unreachable):
            raise ValueError(f"{claim.says!r} has either tests or `unreachable`")
        return claim

    def verdict(self, records: Path) -> str:
        """Verdict of all tests together."""
        if self.unreachable:
            return OUT_OF_REACH
        found = {test.outcome(records)[1] for test in self.tests}
        if NOT_RUN in found:
            return NOT_RUN
        if len(found) == 1:
            return found.pop()
        lost = self.best and "not reproduced" in found
        return IN_PART if "reproduced" in found and not lost else "not reproduced"

    def remark(self, records: Path) -> str:
        """The notes below the table."""
        told = self.verdict(records) in ("reproduced", NOT_RUN)
        return "; ".join(text for text in ("" if told else self.why, self.note) if text)

    def rows(self, records: Path) -> Iterator[list[str]]:
        """Its rows of the table, one for each test."""
        claim = f"{self.says} ({self.source})"
        if self.unreachable:
            yield [claim, f"needs {self.unreachable}", "", "", OUT_OF_REACH]
        for number, test in enumerate(self.tests):
            measured, verdict = test.outcome(records)
            n = str((measured and measured.n) or "")
            yield ["" if number else claim, str(test), str(measured or ""), n, verdict]


@dataclass(frozen=True)
class System:
    """A method, its paper, and what a reader of all its claims should know."""

    paper: str
    note: str = ""


def load(path: Path = CLAIMS) -> tuple[dict[str, System], list[Claim]]:
    """Systems by name, and the claims."""
    given = tomllib.loads(path.read_text(encoding="utf-8"))
    systems = {name: System(**each) for name, each in given["systems"].items()}
    return systems, [Claim.of(each) for each in given["claims"]]


def steps(claims: list[Claim]) -> list[str]:
    """Steps of `claims.sh` that these claims need."""
    return list(dict.fromkeys(s for claim in claims for test in claim.tests for s in test.steps))


def page(records: Path = RECORDS, path: Path = CLAIMS) -> str:
    """The page in Markdown: its prose, which is written by hand, and what the records say."""
    systems, claims = load(path)
    needed = steps(claims)
    of = {name: [claim for claim in claims if claim.system == name] for name in systems}
    sections = [_section(name, system, of[name], records) for name, system in systems.items()]
    parts = {
        "run": COMMAND.format(steps=" ".join(needed)),
        "verdicts": _summary(of, records),
        "systems": "\n\n".join(sections),
        "cells": "\n\n".join(tables(records, needed)),
    }
    return with_parts(PAGE, "claims", parts)


def _summary(systems: Mapping[str, Sequence[Claim]], records: Path) -> str:
    lines = []
    for name, claims in systems.items():
        counted = Counter(claim.verdict(records) for claim in claims)
        lines.append([f"[{name}](#{name.lower()})", *(str(counted[v]) for v in VERDICTS)])
    return table(["system", *VERDICTS], lines)


def _section(name: str, system: System, claims: list[Claim], records: Path) -> str:
    remarks = ((claim.says, claim.remark(records)) for claim in claims)
    parts = [
        f"## {name}",
        f'{system.paper}. `STEPS="{" ".join(steps(claims))}" {RUN} BOOK BOOKS`',
        system.note,
        table(COLUMNS, [line for claim in claims for line in claim.rows(records)]),
        "\n".join(f"- **{says}**: {remark}" for says, remark in remarks if remark),
    ]
    return "\n\n".join(filter(None, parts))


def tables(records: Path, steps: Sequence[str]) -> Iterator[str]:
    """A table for each step that has records: scores of all tasks, and the part kept."""
    for step in steps:
        path = records / step / kinds.RECORDS
        if path.exists():
            yield _table(step, load_results([path]))


def _table(step: str, results: Sequence[CellResult]) -> str:
    cells: dict[str, dict[str, list[CellResult]]] = {}
    for result in results:
        found = cells.setdefault(result.cell.method, {})
        found.setdefault(result.cell.budget or NO_BUDGET, []).append(result)
    budgets = list(dict.fromkeys(budget for each in cells.values() for budget in each))
    tasks = list(dict.fromkeys(result.cell.task for result in results))
    rows = [[f"`{method}`", *_scores(each, budgets, tasks)] for method, each in cells.items()]
    told = f"{' / '.join(kinds.UNITS.get(task, task) for task in tasks)} (part kept)."
    return f"### {step}\n\n{told}\n\n{table(['method', *budgets], rows)}"


def _scores(
    by_budget: Mapping[str, Sequence[CellResult]], budgets: Sequence[str], tasks: Sequence[str]
) -> Iterator[str]:
    """A method's scores by task at each budget, with the mean part kept."""
    for budget in budgets:
        found = {result.cell.task: result for result in by_budget.get(budget, ())}
        scores = [found[task].score for task in tasks if task in found]
        kept = [result.kept for result in found.values() if result.kept is not None]
        text = " / ".join(_text(score.value, found) for score in scores if score is not None)
        yield f"{text} ({kinds.rounded(mean(kept), 2)})" if kept else text


def _text(value: float, found: Mapping[str, CellResult]) -> str:
    """A score; perplexities differ in the second digit."""
    return kinds.rounded(value, 2 if any(each.lower_is_better for each in found.values()) else 1)


class Point(NamedTuple):
    """A threshold, and percent over all tasks of right answers and of entries kept."""

    threshold: float
    score: float
    kept: float


def curve(records: Path, folder: str) -> list[Point]:
    """Points of a method whose records differ in nothing but the threshold, ascending."""
    usual: Any = kvfold.parse(CURVED[folder])
    found = defaultdict(list)
    for one in load_results([records / folder / "records.jsonl"]):
        if one.cell.method == TRUNCATED or one.score is None or one.kept is None:
            continue
        method: Any = kvfold.parse(one.cell.method)
        alike = type(method) is type(usual)
        if alike and replace(method, threshold=usual.threshold) == usual:
            found[method.threshold].append((one.score.value, 100 * one.kept))
    return [
        Point(threshold, *(mean(values) for values in zip(*pairs, strict=True)))
        for threshold, pairs in sorted(found.items())
    ]


def draw(records: Path, path: Path) -> None:
    """Writes the picture; equal records give an equal file."""
    with picture(path, 6.4, 4.2) as drawn:
        panels = drawn.subplots(1, len(CURVED), sharey=True)
        for panel, folder in zip(panels, CURVED, strict=True):
            _panel(panel, curve(records, folder), TITLES[folder])
        panels[0].set_ylabel("percent")
        panels[1].set_xscale("log")
        legend_below(drawn, panels[:1], ncols=2)


def _panel(panel: Axes, points: list[Point], title: str) -> None:
    thresholds, scores, kept = zip(*points, strict=True)
    panel.plot(thresholds, scores, color=COLORS[0], marker="o", label="score")
    panel.plot(thresholds, kept, color=GREY, marker="s", dashes=(4, 3), label="entries kept")
    panel.set_title(title, fontsize=LETTERS)
    panel.set_xlabel("threshold")
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    draw(RECORDS, RECORDS / CURVES)
    PAGE.write_text(page(), encoding="utf-8")
