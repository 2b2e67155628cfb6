# SPDX-License-Identifier: Apache-2.0
"""`docs/generate/`: links rewritten for the site, and pages as Markdown, without building it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import pytest

import kvfold


@pytest.fixture
def module() -> Callable[[str], ModuleType]:
    """A function that imports a module of the folder."""
    return lambda name: import_module(f"docs.generate.{name}")


@pytest.mark.parametrize(
    ("file", "page", "link", "expected"),
    [
        ("README.md", "index.md", "docs/auto.md", "auto.md"),
        ("README.md", "index.md", "CONTRIBUTING.md", "contributing.md"),
        ("README.md", "index.md", "docs/results", "results/README.md"),
        ("docs/python.md", "python.md", "../README.md", "index.md"),
        ("docs/python.md", "python.md", "cli.md#files", "cli.md#files"),
        ("docs/results/README.md", "results/README.md", "../inspect.md", "../inspect.md"),
        ("docs/results/README.md", "results/README.md", "report.md", "report.md"),
        (
            "docs/results/bundled/README.md",
            "results/bundled/README.md",
            "../../../kvfold/bundled/README.md",
            "https://github.com/kvfold/kvfold/blob/main/kvfold/bundled/README.md",
        ),
        ("README.md", "index.md", "examples/", "https://github.com/kvfold/kvfold/tree/main/examples"),
        ("README.md", "index.md", "https://keepachangelog.com/en/1.1.0/", None),
        ("README.md", "index.md", "#methods", None),
    ],
)  # fmt: skip
def test_links_lead_to_pages_or_to_the_repository(module, file, page, link, expected) -> None:
    text = f"See [that]({link}), ![it]({link})."
    assert module("links").for_site(text, file, page) == text.replace(link, expected or link)


def test_a_page_of_a_method_has_all_its_sections(module, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its rows take seconds; `test_site.py` compares them.
    monkeypatch.setattr(module("leaderboard"), "section", lambda cls: f"rows of {cls.__name__}")
    page = module("method_pages").page(kvfold.SnapKV)
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert [line.removeprefix("## ") for line in headings] == [
        "Formula", "Options", "Stages", "Composition", "Leaderboard",
    ]  # fmt: skip
    assert page.endswith("rows of SnapKV")
    assert "`snapkv +` [`adakv`](adakv.md)" in page
    assert "| `snapkv_official` | `window=64`, `kernel=5`, `pooling=avg` |" in page


def test_a_method_that_holds_its_size_composes_further_with_decode_append(module) -> None:
    page = " ".join(module("method_pages")._composition(kvfold.D2O))
    assert "With its defaults it composes with no other method." in page
    assert "`d2o:decode=append +` also" in page and "[`kivi`](kivi.md)" in page


def test_the_reference_has_every_public_name(module) -> None:
    pages = "".join(module("reference").pages().values())
    methods = {cls.__name__ for cls in kvfold.list_methods().values()}
    assert not {n for n in kvfold.__all__ if f"::: kvfold.{n}\n" not in pages} - methods


def test_every_spec_for_users_of_kvpress_is_a_method(module) -> None:
    kvpress = module("kvpress_page")
    rows = kvpress.table()["press"]
    specs = [row["spec"] for row in rows if row["spec"]]
    assert [str(kvfold.parse(spec)) for spec in specs] and len(specs) > 20
    assert len({row["name"] for row in rows}) == len(rows)
    assert all(row["spec"] or row["instead"] for row in rows)


def test_presets_named_after_kvpress_are_in_its_table(module) -> None:
    specs = {row["spec"] for row in module("kvpress_page").table()["press"]}
    assert {name for name in kvfold.list_methods() if name.endswith("_kvpress")} <= specs


def test_equal_sets_were_measured_with_the_specs_of_the_table(module) -> None:
    kvpress = module("kvpress_page")
    specs = {row["name"]: row["spec"] for row in kvpress.table()["press"]}
    measured = kvpress.sets()
    assert {name: each["spec"] for name, each in measured.items()}.items() <= specs.items()
    assert all(0 <= each["equal"] <= each["of"] for each in measured.values())


def test_the_page_for_users_of_kvpress_links_to_methods(module) -> None:
    page = module("kvpress_page").page()
    assert "| `KnormPress` | [`knorm`](methods/knorm.md) | 108 | – |" in page
    assert "| [`snapkv_kvpress + adakv`](methods/adakv.md) | 108 |" in page
    assert "{version}" not in page
