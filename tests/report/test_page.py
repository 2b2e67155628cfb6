# SPDX-License-Identifier: Apache-2.0
"""The page: names stay text, and nothing is asked of a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

from kvfold.report import summary
from kvfold.report.board import boards
from kvfold.report.page import page
from kvfold.report.style import styles
from tests.helpers.reports import HOSTILE, MODEL, known, made


class Tags(HTMLParser):
    """Every tag with its attributes, and what scripts and styles hold, by id or name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = (dict(attrs).get("id") or tag) if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[self.inside] = self.texts.get(self.inside, "") + data


def hostile_page() -> str:
    subject = MODEL.model_copy(update={"name": HOSTILE})
    results = [
        made(task=HOSTILE, subject=subject, group=HOSTILE),
        made(HOSTILE, "0.2", (80.0, 1.0), (-10.0, -12.0, -8.0), HOSTILE, subject=subject,
             group=HOSTILE, errors={HOSTILE: 1}, by={"depth": {"0.0": known(1, 0)}}),
    ]  # fmt: skip
    return page(boards(results), styles(summary.rows(results)))


def test_names_stay_text() -> None:
    text = hostile_page()
    parsed = Tags(text)
    names = [tag for tag, _ in parsed.tags]
    assert names.count("script") == 2 and "img" not in names
    assert "<img" not in text
    data = json.loads(parsed.texts["data"])
    assert [method["name"] for method in data["methods"]] == ["full", HOSTILE]
    assert data["boards"][0]["groups"] == {HOSTILE: [HOSTILE]}


def test_scripts_never_write_html() -> None:
    parsed = Tags(hostile_page())
    forbidden = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function"
    assert not re.search(forbidden, parsed.texts["script"])


def test_the_page_asks_nothing_of_a_network() -> None:
    text = hostile_page()
    parsed = Tags(text)
    assert not re.search(r"https?:|url\(|@import|\bfetch\b|XMLHttpRequest", text)
    for _, attributes in parsed.tags:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    policy = next(a["content"] or "" for t, a in parsed.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(parsed.texts[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
