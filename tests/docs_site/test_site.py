# SPDX-License-Identifier: Apache-2.0
"""The documentation site: built without network, complete, and without a dead link.

`make docs` builds it and runs these on it; without SITE, which it names, they build their own.
"""

from __future__ import annotations

import dataclasses
import html
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import kvfold
from kvfold.methods.registry import preset
from kvfold.report.load import load_results
from kvfold.report.write import write

pytestmark = pytest.mark.whole

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
LEADERBOARDS = [
    folder for folder in (RESULTS, RESULTS / "bundled") if (folder / "report.md").is_file()
]
NAMES = pytest.mark.parametrize("name", kvfold.list_methods())
MEASURED = "".join((f / "records.jsonl").read_text(encoding="utf-8") for f in LEADERBOARDS)
# Own methods that no record names, alone or in a composition
WITHOUT_A_ROW = [
    name
    for name, cls in kvfold.list_methods().items()
    if name == cls.name and not re.search(rf'"method":"([^"]+ \+ )?{name}\b', MEASURED)
]
LOADING = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}
IN_STYLE = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")


class Tags(HTMLParser):
    """Start tags of a page with their attributes."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    if not all(map(find_spec, ("mkdocs", "material", "mkdocstrings"))):
        pytest.skip("the site is built by the extra docs")
    if "SITE" in os.environ:
        return ROOT / os.environ["SITE"]
    out = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.helpers.site", str(out)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return out


@pytest.fixture(scope="module")
def tags(site: Path) -> dict[Path, list[tuple[str, dict[str, str]]]]:
    """Tags of every page."""
    return {page: Tags(page).found for page in site.rglob("*.html")}


def shown(page: Path) -> str:
    """Text of a page's article, on one line."""
    article = page.read_text(encoding="utf-8").partition("<article")[2].partition("</article")[0]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", f"<{article}")).split())


def rows(page: Path, section: str) -> set[tuple[str, ...]]:
    """Rows of the tables below a heading of the second level, as texts of their cells."""
    below = page.read_text(encoding="utf-8").partition(f'<h2 id="{section}">')[2].partition("<h2")
    lines = re.findall(r"<tr>(.*?)</tr>", below[0], re.DOTALL)
    cells = (re.findall(r"<td[^>]*>(.*?)</td>", line, re.DOTALL) for line in lines)
    plain = re.compile(r"<[^>]+>")
    return {tuple(html.unescape(plain.sub("", cell)).strip() for cell in line) for line in cells}


def written(value: object) -> str:
    """An option's value as a method's text has it."""
    return "/".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


@pytest.mark.slow
@NAMES
def test_a_name_has_a_page_with_what_its_class_says(site: Path, name: str) -> None:
    cls = kvfold.list_methods()[name]
    page = site / "methods" / f"{cls.name}.html"
    text, source = shown(page), page.read_text(encoding="utf-8")

    assert name in text
    assert " ".join(cls.summary.split()).replace("`", "") in text.replace(" ,", ",")
    assert cls.formula and " ".join(cls.formula.split()) in text
    assert f"{cls.name}.html" in (site / "methods" / "index.html").read_text(encoding="utf-8")
    assert not cls.paper or f"arxiv.org/abs/{cls.paper.removeprefix('arXiv ')}" in source
    assert f"kvfold/methods/{Path(inspect.getfile(cls)).name}" in source


@NAMES
def test_a_page_has_every_option_and_the_values_of_presets(site: Path, name: str) -> None:
    cls, method = kvfold.list_methods()[name], preset(name)
    held = rows(site / "methods" / f"{cls.name}.html", "options")
    options = {row[0]: row for row in held if len(row) == 4}
    values = dict(row for row in held if len(row) == 2)

    for option in dataclasses.fields(cls):
        _, kind, default, about = options[option.name]
        assert kind and about
        assert default == written(option.default)
        if getattr(method, option.name) != option.default:
            assert f"{option.name}=" in values[name]


@pytest.mark.parametrize(
    "repository", ["FasterDecoding/SnapKV", "snu-mllab/KVzip", "NVIDIA/kvpress"]
)
def test_released_code_is_linked(site: Path, repository: str) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "methods").iterdir())
    assert f'href="https://github.com/{repository}"' in pages


@pytest.mark.parametrize("folder", LEADERBOARDS, ids=lambda folder: folder.name)
def test_rows_of_the_leaderboard_are_those_of_the_report(site: Path, folder: Path) -> None:
    """Every row of the report's tables of all tasks is on the pages of its methods."""
    report = (folder / "report.md").read_text(encoding="utf-8")
    tables = re.findall(r"### all tasks\n\n.*?\n\n((?:\|.*\n)+)", report)
    lines = [line.strip("| \n").split(" | ") for table in tables for line in table.splitlines()[2:]]
    pages = {
        name: rows(site / "methods" / f"{name}.html", "leaderboard")
        for name in ("snapkv", "kivi", "auto")
    }
    compared = 0
    for line in lines:
        for name in {part.partition(":")[0] for part in line[0].split(" + ")} & set(pages):
            assert tuple(line[:7]) in pages[name]
            compared += 1

    # A run that goes on has few rows yet.
    assert len(tables) == 2 and compared > 20 if folder.name == "bundled" else compared


@pytest.mark.slow
@pytest.mark.parametrize("folder", LEADERBOARDS, ids=lambda folder: folder.name)
def test_the_page_to_sort_and_filter_is_the_report_of_the_records(
    site: Path, folder: Path, tmp_path: Path
) -> None:
    report = write(load_results([folder / "records.jsonl"]), tmp_path).paths[0]
    assert (site / folder.relative_to(ROOT / "docs") / "leaderboard.html").read_bytes() == (
        report.read_bytes()
    )


@pytest.mark.parametrize("name", WITHOUT_A_ROW)
def test_a_method_that_was_not_measured_says_so(site: Path, name: str) -> None:
    assert "The leaderboard has no row of this method." in shown(site / "methods" / f"{name}.html")


def test_public_names_are_in_the_reference_or_have_a_page(site: Path) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").iterdir())
    methods = {cls.__name__ for cls in kvfold.list_methods().values()}
    missing = {name for name in kvfold.__all__ if f'id="kvfold.{name}"' not in pages}
    assert missing <= methods


def test_nothing_is_loaded_from_the_network(site: Path, tags) -> None:
    assert len(tags) > 50
    loaded = [
        (page.name, attributes[LOADING[tag]])
        for page, found in tags.items()
        for tag, attributes in found
        if tag in LOADING and re.match(r"(?:https?:)?//", attributes.get(LOADING[tag], ""))
    ]
    styles = [*site.rglob("*.css"), *tags]
    loaded += [(p.name, url) for p in styles for url in IN_STYLE.findall(p.read_text("utf-8"))]
    assert not loaded
    # The theme's script fetches a diagram's library, and a repository's stars, for these.
    for _, attributes in (tag for found in tags.values() for tag in found):
        assert "mermaid" not in attributes.get("class", "").split()
        assert attributes.get("data-md-component") != "source"


def test_links_inside_the_site_are_alive(site: Path, tags) -> None:
    ids = {page: {a["id"] for _, a in found if "id" in a} for page, found in tags.items()}

    def dead() -> Iterator[str]:
        for page, found in tags.items():
            for _, attributes in found:
                link = urlsplit(attributes.get("href", attributes.get("src", "")))
                if link.scheme or link.netloc or page.name == "404.html":
                    continue
                path = (page.parent / unquote(link.path)).resolve() if link.path else page
                known = ids.get(path, set())
                if not path.exists() or (link.fragment and unquote(link.fragment) not in known):
                    yield f"{page.relative_to(site)}: {link.geturl()}"

    assert not list(dead())
