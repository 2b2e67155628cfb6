# SPDX-License-Identifier: Apache-2.0
"""The page holds what was measured; hostile text is data."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

import kvfold
from kvfold.inspect.attention_maps import CELLS, LayerAttention, means, watch_attention
from kvfold.inspect.inspected_text import InspectedText
from kvfold.inspect.page import contents, page
from kvfold.inspect.retention import Retention, measure_retention
from tests.helpers.inspected import HOSTILE, Tags, grid


def test_the_page_holds_what_was_measured(
    looked_at: tuple[InspectedText, list[LayerAttention], list[Retention]],
) -> None:
    document, layers, retentions = looked_at
    data = json.loads(Tags(page("model", document, layers, retentions)).data)
    tokens = len(document.pieces)
    assert data == json.loads(json.dumps(contents("model", document, layers, retentions)))
    assert tuple(data["pieces"]) == document.pieces
    for shown, retention in zip(data["methods"], retentions, strict=True):
        assert np.array_equal(grid(shown["counts"], (4, tokens)), retention.counts.numpy())
    for shown, layer in zip(data["attention"], layers, strict=True):
        levels = grid(shown["cells"], (CELLS, CELLS)).astype(float)
        cells = layer.cells.numpy()
        assert np.array_equal(levels == 0, cells == 0)
        strong = cells > 1e-5
        decoded = 10 ** (5 * (levels[strong] - 255) / 254)
        assert np.abs(np.log10(decoded / cells[strong])).max() < 5 / 254
        edges = grid(shown["edges"], (min(tokens, 600),)) / 255
        assert np.abs(edges - means(layer.edges, 600).numpy()).max() < 1 / 255


def test_hostile_text_is_data_and_nothing_is_fetched(bundled: tuple[Any, Any]) -> None:
    model, tokenizer = bundled
    document = InspectedText.of(tokenizer, HOSTILE * 3)
    retentions = [measure_retention(model, tokenizer, document, "knorm", kvfold.Budget.ratio(0.5))]
    whole = page("<b>m</b></title>", document, watch_attention(model, document.ids), retentions)
    tags = Tags(whole)
    kinds = [tag for tag, _ in tags.found]
    assert kinds.count("script") == 2 and "b" not in kinds
    assert "".join(json.loads(tags.data)["pieces"]).endswith(HOSTILE * 3)
    assert not re.search(r"https?:|//\w+\.|url\(|@import|fetch\(|innerHTML|eval\(", whole)
    loaded = {"src", "href", "action", "onload", "onerror"}
    assert not any(loaded & attributes.keys() for _, attributes in tags.found)
    assert "default-src 'none'" in whole
