# SPDX-License-Identifier: Apache-2.0
"""The table of captured steps is what the code does with each method."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

import kvfold
from docs.generate.made import DOCS
from kvfold import CompressedCache
from kvfold.generation.static.captured import CapturedCache, eager_because
from kvfold.generation.static.evicting import StaticEvicting
from kvfold.generation.static.segments import StaticSegments
from tests.helpers.budgets import NAMED, compressed
from tests.helpers.compiled import ALONE, small
from tests.helpers.models import prompts

ROW = re.compile(r"^\| (.+?) \| (.+?) \| (captured.*|eager: .+?) \|$", re.MULTILINE)


@pytest.mark.whole
def test_every_method_stands_where_it_belongs():
    model, rows = small("llama"), defaultdict[tuple[str, str], set[str]](set)
    for spec in (spec for spec in NAMED if not spec.startswith("kvzip")):  # needs a tokenizer
        cache = compressed(model, spec)
        why = eager_because(cache)
        row = kind(model, cache) if why is None else ("any", f"eager: {why}")
        rows[row].add(spec.split(":")[0])
    text = (DOCS / "captured.md").read_text("utf-8")
    told = {
        (held, steps): set(re.findall(r"`(\w+)`", names))
        for held, names, steps in ROW.findall(text)
    }
    assert told == rows


def kind(model: object, cache: CompressedCache) -> tuple[str, str]:
    """What the layers hold once a prompt was read, and how they are captured."""
    if cache.method.stages().encode is not None:
        return "encoded entries", "captured, anew when entries are encoded"
    kvfold.generate(model, prompts(ALONE)[0], cache=cache, max_new_tokens=1)  # type: ignore[arg-type]
    handed = CapturedCache(cache, room=4)
    handed.fix()
    if any(isinstance(layer, StaticSegments) for layer in handed.layers):
        return "an own number of entries for each head", "captured"
    if any(isinstance(layer, StaticEvicting) for layer in handed.layers):
        return "equally many entries, one of which leaves at every step", "captured"
    return "equally many entries, all of which stay", "captured"
