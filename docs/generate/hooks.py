# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs: add the pages made from the registry, and those of files outside docs/."""

from __future__ import annotations

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.generate import kvpress_page, leaderboard, links, method_pages, reference
from docs.generate.made import DOCS, ROOT

# Pages of the really trained model, which are there once it has records
PUBLISHED = {"All tables": "results/report.md", "By task": "results/tasks.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds generated pages, and those of results that are published, to the navigation."""
    methods = [{name: f"methods/{name}.md"} for name in method_pages.classes()]
    found = {name: page for name, page in PUBLISHED.items() if (DOCS / page).is_file()}
    _section(config, "Results")[1:1] = [{name: page} for name, page in found.items()]
    _section(config, "Methods").extend([{"All methods": "methods/index.md"}, *methods])
    _section(config, "Reference").extend({title: _address(title)} for title in reference.pages())
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages, and leaderboards to sort and filter."""
    made = {page: (ROOT / file).read_text("utf-8") for file, page in links.OUTSIDE.items()}
    made["coming-from-kvpress.md"] = kvpress_page.page()
    made["methods/index.md"] = method_pages.overview()
    for name, cls in method_pages.classes().items():
        made[f"methods/{name}.md"] = method_pages.page(cls)
    for title, text in reference.pages().items():
        made[_address(title)] = text
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for folder, text in leaderboard.to_sort().items():
        files.append(File.generated(config, f"{folder}/leaderboard.html", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Redirects links to files outside docs/ to their pages, or to the repository."""
    path = page.file.src_uri
    if page.parent is None:  # no section, whose pages would be listed beside it
        page.meta["hide"] = ["navigation"]
    outside = {of: file for file, of in links.OUTSIDE.items()}
    text = links.for_site(markdown, outside.get(path, f"docs/{path}"), path)
    return text.replace("`leaderboard.html`", "[leaderboard.html](leaderboard.html)")


def _section(config: MkDocsConfig, title: str) -> list[Any]:
    """The list of a section's pages in the navigation."""
    assert config.nav is not None
    return next(section[title] for section in config.nav if title in section)


def _address(title: str) -> str:
    return f"reference/{title.lower().replace(' ', '-')}.md"
