# SPDX-License-Identifier: Apache-2.0
"""Parts of every page: text of users stays text, and the policy allows its own parts alone."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest
from matplotlib.figure import Figure

from kvfold.evidence.outputs import OF_PAGES
from kvfold.evidence.page import embedded, facts, filled, picture, table, whole
from tests.helpers.inspected import Tags
from tests.helpers.reports import HOSTILE


def test_a_page_names_kvfold_and_allows_its_own_style_and_script_only() -> None:
    made = whole(HOSTILE, HOSTILE, "b { color: red }", "<p>body</p>", script="go()", data=HOSTILE)
    tags = Tags(made)
    assert [tag for tag, _ in tags.found].count("script") == 2 and "img" not in dict(tags.found)
    assert json.loads(tags.data) == HOSTILE and OF_PAGES in made.encode()
    policy = next(a["content"] or "" for _, a in tags.found if a.get("http-equiv"))
    for kind, text in (("style", "b { color: red }"), ("script", "go()")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_a_page_without_script_allows_none() -> None:
    made = whole("a", "b", "", "<p>body</p>")
    assert "script-src" not in made and "<script" not in made
    assert made.endswith("<p>body</p></body>\n</html>\n")


def test_parts_of_a_page() -> None:
    assert filled("a @@ONE@@ and @@TWO@@", {"ONE": "1", "TWO": "@@2@@"}) == "a 1 and @@2@@"
    with pytest.raises(KeyError):
        filled("@@THREE@@", {})
    assert facts({"a": "<b>", "none": ""}) == "<dt>a</dt><dd>&lt;b&gt;</dd>"
    made = table("names", ("x", "y"), [("1", "2"), ("3", "4")])
    assert made.count("<tr>") == 3 and made.count("<td>") == 4 and '<table class="names">' in made
    assert 'alt="&lt;i&gt;" src="data:image/png;base64,' in picture(Figure(), "<i>")


def test_embedded_data_is_the_same_data() -> None:
    data = {"name": f"{HOSTILE}&\u2028\u2029é", "number": 0.1}
    text = embedded(data)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == data
