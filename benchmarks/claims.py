# SPDX-License-Identifier: Apache-2.0
"""The page on the papers' claims, from the records: `python benchmarks/claims.py`.

`benchmarks/claims.toml` lists the claims, `benchmarks/claims.sh` makes the records of
docs/results/claims, and this writes docs/claims.md. No number of the page is typed by hand.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import claims_curves
from claims_evidence import Better, Kept, Layers, Measured, Operations, Rule, RuleKind

ROOT = Path(__file__).parents[1]
CLAIMS = ROOT / "benchmarks" / "claims.toml"
RESULTS, PAGE = ROOT / "docs" / "results" / "claims", ROOT / "docs" / "claims.md"
KINDS = {"better": Better, "layers": Layers, "kept": Kept, "operations": Operations}
RULES: tuple[RuleKind, ...] = ("above", "below", "within", "beyond")
NOT_RUN, OUT_OF_REACH, IN_PART = "not run yet", "out of reach here", "in part"
VERDICTS = ("reproduced", IN_PART, "not told apart", "not reproduced", NOT_RUN, OUT_OF_REACH)

HEAD = """\
# Claims of five papers

Central claims of the papers behind PyramidKV, KVzip, D2O, SimLayerKV and DBudgetKV, and what came
of them on SmolLM2-135M-Instruct (30 layers, 9 query and 3 KV heads). It is far smaller than the
papers' models, and its texts are shorter: a claim that fails here may hold there.

A claim has one or more tests, each with a rule for the 95 % interval of a mean. A test is
*reproduced* if the interval lies where the rule says, *not reproduced* if it lies outside, and
*not told apart* if it is on both sides. The rules were set before the runs, those on layers after
a look at one passage, and SimLayerKV's test of `when=first_decode` against `full` after its run. A
claim is reproduced *in part* if some of its tests are. Differences are paired by sample, as in
[evaluation](evaluation.md). Points are of RULER's needles at 1024 tokens, in noise and in a novel;
perplexities are of a novel, and lower ones are better.

Each step goes on where it stopped, and this page is made from its records. `BOOK` is a text file
(Project Gutenberg's 84), `BOOKS` a folder of novels; records name the commit, so commit first.

```
make real
STEPS="{steps}" benchmarks/claims.sh BOOK BOOKS
python benchmarks/claims.py
```
"""
LAYERS = """\
![statistics over layers](results/claims/layers/layers.png)

Each line is the mean over passages of novels, the band goes from the lowest to the highest passage.
"""
THRESHOLDS = """\
![score and entries kept over the threshold](results/claims/thresholds.svg)

SimLayerKV trims a layer if more than the threshold of the last query's attention is on sinks and
recent tokens. DBudgetKV evicts until the norm of the newest query's attention has fallen by the
threshold. Both are means over the two needles, 80 samples, with the question in view.
"""


@dataclass(frozen=True)
class Test:
    """A measurement and the rule of its verdict."""

    evidence: Better | Layers | Kept | Operations
    rule: Rule

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Test:
        """A test as `claims.toml` writes it; raises ValueError without exactly one rule."""
        rules = [Rule(kind, given[kind]) for kind in RULES if kind in given]
        if len(rules) != 1:
            raise ValueError(f"a test has one of {', '.join(RULES)}: {given}")
        options = {name: value for name, value in given.items() if name not in ("kind", *RULES)}
        return cls(KINDS[given["kind"]](**options), rules[0])

    def outcome(self, records: Path) -> tuple[Measured | None, str]:
        """The measurement, if there is one, and the verdict."""
        measured = self.evidence.measured(records)
        return measured, self.rule.verdict(measured) if measured else NOT_RUN

    @property
    def step(self) -> str:
        """The step of `claims.sh` that makes the records."""
        return getattr(self.evidence, "folder", "layers")


@dataclass(frozen=True)
class Claim:
    """A paper's claim: its tests, or what a test here would need."""

    system: str
    says: str
    source: str
    tests: tuple[Test, ...] = ()
    unreachable: str = ""
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
        return IN_PART if "reproduced" in found else "not reproduced"

    def remarks(self, records: Path) -> Iterator[str]:
        """What is said below the table."""
        if self.verdict(records) not in ("reproduced", NOT_RUN):
            yield self.why
        yield self.note

    def rows(self, records: Path) -> Iterator[str]:
        """Its rows of the table, one for each test."""
        claim = f"{self.says} ({self.source})"
        if self.unreachable:
            yield _row(claim, f"needs {self.unreachable}", "", "", OUT_OF_REACH)
        for number, test in enumerate(self.tests):
            measured, verdict = test.outcome(records)
            yield _row(
                "" if number else claim,
                f"{test.evidence}: {test.rule}",
                str(measured or ""),
                str(measured.n if measured else ""),
                verdict,
            )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def load(path: Path = CLAIMS) -> tuple[dict[str, str], list[Claim]]:
    """Papers by system, and the claims."""
    given = tomllib.loads(path.read_text(encoding="utf-8"))
    papers = {name: each["paper"] for name, each in given["systems"].items()}
    return papers, [Claim.of(each) for each in given["claims"]]


def steps(claims: list[Claim]) -> list[str]:
    """Steps of `claims.sh` that these claims need."""
    return list(dict.fromkeys(test.step for claim in claims for test in claim.tests))


def page(records: Path = RESULTS, path: Path = CLAIMS) -> str:
    """The page in Markdown."""
    papers, claims = load(path)
    parts = [HEAD.format(steps=" ".join(steps(claims))), _summary(papers, claims, records)]
    if (records / "layers" / "layers.png").exists():
        parts.append(LAYERS)
    if (records / claims_curves.FILE).exists():
        parts.append(THRESHOLDS)
    for system, paper in papers.items():
        parts.append(_section(system, paper, [c for c in claims if c.system == system], records))
    return "\n".join(parts)


def _summary(papers: Mapping[str, str], claims: list[Claim], records: Path) -> str:
    lines = [_row("system", *VERDICTS), _row(*["---"] * (len(VERDICTS) + 1))]
    for system in papers:
        counted = Counter(claim.verdict(records) for claim in claims if claim.system == system)
        lines.append(_row(f"[{system}](#{system.lower()})", *(str(counted[v]) for v in VERDICTS)))
    return "\n".join(lines) + "\n"


def _section(system: str, paper: str, claims: list[Claim], records: Path) -> str:
    lines = [
        f"## {system}",
        "",
        f'{paper}. `STEPS="{" ".join(steps(claims))}" benchmarks/claims.sh BOOK BOOKS`',
        "",
        _row("claim", "test", "result (95 %)", "n", "verdict"),
        _row(*["---"] * 5),
        *(row for claim in claims for row in claim.rows(records)),
    ]
    reasons = [
        f"- **{claim.says}**: {text}" for claim in claims for text in claim.remarks(records) if text
    ]
    return "\n".join([*lines, "", *reasons, *([""] if reasons else [])])


if __name__ == "__main__":
    claims_curves.draw(RESULTS, RESULTS / claims_curves.FILE)
    PAGE.write_text(page(), encoding="utf-8")
