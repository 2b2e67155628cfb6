# SPDX-License-Identifier: Apache-2.0
"""The text that is inspected: tokens, needles, blank lines."""

from __future__ import annotations

import re
from typing import Any

from kvfold.inspect.inspected_text import InspectedText
from kvfold.inspect.page import folded
from tests.helpers.inspected import HOSTILE


def test_tokens_joined_are_the_text(bundled: tuple[Any, Any]) -> None:
    document = InspectedText.of(bundled[1], HOSTILE)
    assert len(document.pieces) == document.ids.shape[1]
    assert "".join(document.pieces).endswith(HOSTILE)


def test_needles_are_found_and_one_is_asked_for(bundled: tuple[Any, Any]) -> None:
    document = InspectedText.with_needles(bundled[1], 600, seed=5)
    texts = ["".join(document.pieces[n.start : n.stop]) for n in document.needles]
    assert len(texts) == 6
    assert all(re.fullmatch(r"\s*One of the special .* is: \d+\.\s*", text) for text in texts)
    asked = [text for n, text in zip(document.needles, texts, strict=True) if n.asked]
    key = re.search(r"for (\S+) is", asked[0])
    assert len(asked) == 1 and key is not None
    assert key[1] in document.text.rpartition("\n")[2]


def test_blank_lines_do_not_fill_the_page() -> None:
    pieces = ["a", "\n", "\n\n", " \n", "b\n", "\n", "c"]
    shown = [folded(pieces).get(i, piece) for i, piece in enumerate(pieces)]
    assert shown == ["a", "\n", "\n↵", " ↵", "b\n", "\n", "c"]
    assert folded(["a", "\n\n", "b"]) == {}
