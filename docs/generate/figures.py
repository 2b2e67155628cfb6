# SPDX-License-Identifier: Apache-2.0
"""Sources of the numbers that the pages state: `python -m docs.generate.figures`.

`docs/figures.toml` says, section by section, what they follow from. Numbers of published records
must be values of methods that the same paragraph names, and intervals those of a method or of a
difference between two. Numbers of a command are held by a digest, so that none changes without a
new entry. What is no measurement is recognised by `PLAIN` (code, papers, versions), or the section
is listed among the settings.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import permutations, product
from typing import Any, NamedTuple

from docs.generate import paired
from docs.generate.made import DOCS, RESULTS, ROOT
from kvfold.eval.run.cell import FULL
from kvfold.report.board import Board, boards
from kvfold.report.load import load_results
from kvfold.report.summary import ReportRow, rows

LEDGER = DOCS / "figures.toml"
# Made by `kvfold report` and other benchmarks; own tests compare them with the records.
GENERATED = "report.md", "tasks.md", "claims.md", "evidence.md", "which-method.md"
MADE = RESULTS / "README.md"
PLAIN = re.compile(
    r"""```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]+>  # code, targets of links, tags
    |^\#.*?$|^\s*\d+\.\s                       # headings, items of a list
    |ICML\ \d+|arXiv\ [\d.]+(?:,\ section\ [\d.]+)?|\b\d{4}-\d\d-\d\d\b
    |(?:[Ss]ections?|[Ee]quations?|[Ff]igures?|[Tt]ables?|steps?|Python|torch|vLLM|transformers
       |kvpress|RFC|ports?|HTTP|status|version|commit|Project\ Gutenberg)\s[(]?\d[\w.]*[)]?
       (?:\ (?:and|to|or)\ [\d.]+)?
    |\b\d+-bit|\b(?:2,\ 4\ or\ 8|\d+)\ bits?|\b95\ %(?:\ [ci]\w+)?""",
    re.S | re.M | re.X,
)
NUMBER = re.compile(r"(?<![\w.,-])[+−]?\d+(?:[ ,]\d{3})*(?:\.\d+)?(?![\w]|\.\d)")
INTERVAL = re.compile(r"[+−]?\d+\.\d \([+−]?\d+\.\d to [+−]?\d+\.\d\)")
# Names that paragraphs give to methods of the records.
WORDS = {
    "local_window": "window",
    "random": "random eviction",
    "cut": "`cut`|truncated context",
    "merge": "merging",
    "streaming_llm": "streamingllm|sinks and\\s+recent",
}


class Section(NamedTuple):
    """A part of a page below one heading; `heading` is "" above the first one."""

    page: str
    heading: str
    text: str

    @property
    def numbers(self) -> list[str]:
        """Its numbers that `PLAIN` does not explain."""
        return numbers(self.text)


def numbers(text: str) -> list[str]:
    return NUMBER.findall(PLAIN.sub(" ", text))


def pages() -> list[str]:
    """Pages that are written by hand."""
    every = DOCS.rglob("*.md")
    found = [path for path in every if path.name not in GENERATED and path != MADE]
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in found)]


def sections(page: str) -> Iterator[Section]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for part in re.split(r"^(?=## )", text, flags=re.M):
        heading = part.partition("\n")[0].removeprefix("## ") if part.startswith("## ") else ""
        yield Section(page, heading, part)


def ledger() -> dict[tuple[str, str], dict[str, Any]]:
    """Entries by page and heading; those of settings are empty."""
    text = tomllib.loads(LEDGER.read_text(encoding="utf-8"))
    plain: dict[tuple[str, str], dict[str, Any]] = {
        (page, name): {} for page, names in text["settings"].items() for name in names
    }
    return plain | {(e["page"], e["heading"]): e for e in text["records"] + text["measured"]}


def digest(section: Section) -> str:
    """Eight characters that change with any of a section's numbers."""
    return hashlib.sha256(" ".join(section.numbers).encode()).hexdigest()[:8]


def faults() -> list[str]:
    """Figures on pages without a source, and those of the ledger on no page."""
    listed, found = ledger(), list[str]()
    for section in (one for page in pages() for one in sections(page)):
        entry = listed.pop((section.page, section.heading), None)
        at = f"{section.page}, {section.heading or 'above the first heading'}"
        if entry is None:
            found += [f"{at}: {number} has no source" for number in section.numbers]
        elif "folders" in entry:
            found += [f"{at}: {fault}" for fault in unrecorded(section, entry)]
        elif "figures" in entry:
            found += [f"{at}: {fault}" for fault in _undeclared(section, entry)]
    return found + [f"{page}, {heading}: no such section" for page, heading in listed]


def _undeclared(section: Section, entry: dict[str, Any]) -> Iterator[str]:
    text = " ".join(section.text.split())
    yield from (f"does not name `{c}`" for c in entry.get("commands", ()) if c not in text)
    if digest(section) != entry["figures"]:
        yield f"other numbers than on {entry['committed']}: their digest is {digest(section)}"


def unrecorded(section: Section, entry: dict[str, Any]) -> Iterator[str]:
    """Numbers of a section that are not values of the methods that their paragraph names."""
    stated = {str(number) for number in entry.get("stated", ())}
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", section.text):
        text = " ".join(paragraph.split())
        named = [
            (folder, method)
            for folder in entry["folders"]
            for method in values(folder)
            if all(_names(text, part) for part in _parts(method))
        ]
        allowed = stated.union(*(values(folder)[method] for folder, method in named))
        for interval in INTERVAL.findall(text):
            if interval not in allowed and not _is_difference(interval, named):
                yield f"{interval} is in no record, nor a difference of two"
        rest = INTERVAL.sub(" ", PLAIN.sub(" ", text))
        yield from (
            f"{number} is no value of a method that its paragraph names"
            for number in NUMBER.findall(rest)
            if number.lstrip("+−") not in allowed
        )


def _parts(method: str) -> list[str]:
    """Names of the methods that a composition is made of, without options."""
    return [part.split(":")[0].strip() for part in method.split("+")]


def _names(text: str, method: str) -> bool:
    return method == FULL or bool(re.search(WORDS.get(method, method), text, re.I))


@cache
def values(folder: str) -> dict[str, frozenset[str]]:
    """Texts of all values in a folder's records, by method; lengths are the full cache's."""
    found: dict[str, set[str]] = {}
    for board in boards(load_results([RESULTS / folder / "records.jsonl"])):
        found.setdefault(FULL, set()).update(map(str, board.lengths(board.results)))
        for row in _rows(board):
            found.setdefault(row.method, set()).update(_texts(row))
    return {method: frozenset(texts) for method, texts in found.items()}


def _rows(board: Board) -> list[ReportRow]:
    texts = (row for own in board.texts.values() for row in rows(own))
    return [*(row for view in board.views() for row in view.rows), *texts]


def _texts(row: ReportRow) -> Iterator[str]:
    """A row's values in the forms that pages write them."""
    yield from re.findall(r"\d+(?:\.\d+)?", f"{row.method} {row.budget or ''}")
    yield from map(str, (row.samples, row.units))
    if row.score:
        yield f"{row.score.value:.1f}"
        yield f"{row.score.value:.0f}"
        yield f"{row.score.value * row.samples / 100:.0f}"
    if row.gap:
        yield paired.written(row.gap)
    for share in (row.kept, row.bytes_ratio):
        if share is not None:
            yield from (f"{share:.2f}", f"{share:.3f}", f"{100 * share:.0f}")


def _is_difference(interval: str, named: list[tuple[str, str]]) -> bool:
    """True if two of the named methods differ by this, at one budget and on one set of tasks."""
    return any(
        interval in _differences(folder, one, other)
        for (folder, one), (same, other) in permutations(named, 2)
        if folder == same
    )


@cache
def _differences(folder: str, one: str, other: str) -> frozenset[str]:
    """Differences of two methods at every shared budget, over all tasks, on each and each text."""
    samples = _samples(folder)
    names = {name for cells in samples.values() for name in cells}
    pairs = [(name, other + name[len(one) :]) for name in names if name.partition("@")[0] == one]
    scopes: set[tuple[str | None, str | None]] = {(None, None)}
    for unit in samples:
        scopes |= {(unit.task, None), (unit.task, unit.data)}
    found = set()
    for mine, theirs in pairs:
        every = paired.differences(samples, mine, theirs)
        for aware, scope in product((False, True), scopes):
            own = {unit: each for unit, each in every.items() if unit.within(aware, *scope)}
            with suppress(SystemExit):  # perplexities of several texts
                found |= {paired.written(paired.pooled(own))} if own else set()
    return frozenset(found)


@cache
def _samples(folder: str) -> paired.Samples:
    return paired.load(RESULTS / folder)


if __name__ == "__main__":
    wrong = faults()
    print("\n".join(wrong) or "every number has its source")
    sys.exit(bool(wrong))
