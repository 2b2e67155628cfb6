# SPDX-License-Identifier: Apache-2.0
"""The bundled model, and a text that is looked at once."""

from __future__ import annotations

from typing import Any

import pytest

import kvfold
from kvfold.inspect.attention_maps import LayerAttention, watch_attention
from kvfold.inspect.inspected_text import InspectedText
from kvfold.inspect.retention import Retention, measure_retention


@pytest.fixture(scope="module")
def bundled() -> tuple[Any, Any]:
    return kvfold.bundled_model()


@pytest.fixture(scope="module")
def looked_at(
    bundled: tuple[Any, Any],
) -> tuple[InspectedText, list[LayerAttention], list[Retention]]:
    model, tokenizer = bundled
    document = InspectedText.with_needles(tokenizer, 400, seed=1)
    retentions = [
        measure_retention(model, tokenizer, document, method, kvfold.Budget.ratio(0.3))
        for method in ("pyramidkv", "adakv")
    ]
    return document, watch_attention(model, document.ids), retentions
