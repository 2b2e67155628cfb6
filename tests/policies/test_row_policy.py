# SPDX-License-Identifier: Apache-2.0
"""Rounds over an engine's entries keep what `CompressedCache` keeps, round by round."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kvfold import CompressedCache, KvfoldError
from kvfold.cache import rounds
from kvfold.policies import policy
from kvfold.policies.row_policy import RowPolicy, StoredRow
from tests.helpers.engine import least, recorded
from tests.helpers.models import build, prompts

PROMPT, STEPS, BUDGET = 64, 40, 0.5
SPECS = [
    "snapkv:window=8",
    "adakv:window=8",
    "pyramidkv:window=8",
    "knorm",
    "keydiff",
    "rkv:window=8",
]


def told(state: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Keys, values and tokens of each head of a layer that is stored."""
    keys, values = state.stored().dense()
    columns = state.columns()[0]
    there = columns >= 0
    return tuple(
        [rows[own].clone() for rows, own in zip(part, there, strict=True)]
        for part in (keys[0], values[0], columns)
    )


@torch.no_grad()
def cached_rounds(
    model: Any, ids: Tensor, spec: str
) -> list[tuple[StoredRow, list[list[list[int]]]]]:
    """What each round of a cache saw, and the tokens that stayed."""
    cache, layers, seen, found = CompressedCache(model, spec, BUDGET), [], [], []
    run = rounds.evict_round

    def spied(state: Any, call: Any) -> None:
        window = state.observers.window.answer
        queries = window.joined()[0][0].clone() if window.width else None
        layers.append((*told(state), queries))
        seen.append(state.sequence.seen)
        run(state, call)

    model(ids[:, :PROMPT], past_key_values=cache)
    with patch.object(rounds, "evict_round", spied):
        for token in ids[:, PROMPT:].split(1, 1):
            model(token, past_key_values=cache)
            if layers:
                keys, values, tokens, queries = zip(*layers, strict=True)
                read = None if queries[0] is None else queries
                after = [
                    [head.tolist() for head in cache.positions(layer)[0]]
                    for layer in range(len(layers))
                ]
                found.append((StoredRow(keys, values, tokens, seen[-1], read), after))
                layers.clear()
    return found


@pytest.mark.parametrize("pages", ["", " + pages:size=8"])
@pytest.mark.parametrize("every", [4, 16])
@pytest.mark.parametrize("spec", SPECS)
def test_rounds_keep_what_the_cache_keeps(spec: str, every: int, pages: str) -> None:
    model, ids = build("llama"), prompts((PROMPT + STEPS,))[0]
    whole = f"{spec} + every:interval={every}{pages}"
    made = policy(whole)
    row = RowPolicy(made, BUDGET)
    prefill = least(made, recorded(model, ids[:, :PROMPT]))
    first = row.prompt(prefill)
    expected = made.keep(prefill, BUDGET)
    for own, same in zip(first.indices, expected.indices, strict=True):
        assert [head.tolist() for head in own] == [head.tolist() for head in same]
    found = cached_rounds(model, ids, whole)
    assert len(found) == STEPS // every
    for stored, after in found:
        kept = row.round(stored)
        assert kept is not None
        tokens = [
            [of_head[own].tolist() for of_head, own in zip(*of_layer, strict=True)]
            for of_layer in zip(stored.tokens, kept, strict=True)
        ]
        assert tokens == after
        assert any(
            len(own) < len(of_head) for own, of_head in zip(kept[0], stored.tokens[0], strict=True)
        )


@pytest.mark.parametrize("spec", ["snapkv:window=8", "h2o:decode=append"])
def test_methods_without_rounds_over_entries_are_refused(spec: str) -> None:
    model, ids = build("llama"), prompts((PROMPT,))[0]
    row = RowPolicy(policy(spec), BUDGET)
    row.prompt(least(row.policy, recorded(model, ids)))
    with pytest.raises(KvfoldError, match="has no rounds over an engine's entries"):
        row.round(StoredRow([], [], [], PROMPT))
