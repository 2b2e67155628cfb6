# SPDX-License-Identifier: Apache-2.0
"""Non-causal attention and Compactor: golden numbers, and both by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.kernels.chunk_attention import chunk_sums
from kvfold.methods.compactor import blended
from kvfold.methods.observation import Observation
from kvfold.methods.stages.score.chunk_attention import non_causal_scores, standardized
from kvfold.methods.stages.select.forced import Forced
from kvfold.observers.chunk_sums import ChunkSumsNeed
from kvfold.observers.stored import KeysBeforeRope
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    SHAPES,
    Head,
    Keep,
    Layer,
    assert_prefill,
    before_rope,
    best,
    newest,
)
from tests.helpers.observations import KEYS, QUERIES, T, observed

CHUNK = 10
POOLED = [1.144408, 1.888589, 1.676117, 2.013298, 2.226538, 2.229259, 2.249368, 1.291948]
Z = [-1.606584, 0.112370, -0.378409, 0.400432, 0.892986, 0.899271, 0.945721, -1.265788]
BLENDED = [-1.603922, -0.156269, -0.647764, 0.402385, 0.894222, 0.901580, 0.675661, -0.465893]


def seen(left: int) -> Observation:
    """The golden entries, in chunks of 4, with keys that RoPE leaves as they are."""
    whole = observed(left=left)
    sums = chunk_sums(QUERIES[None, None], KEYS[None, None], torch.arange(T)[None], 4)
    return dataclasses.replace(
        whole,
        observed={
            ChunkSumsNeed: torch.cat([torch.full((1, 1, left), 9.0), sums], -1),
            KeysBeforeRope: whole.positions.clamp(min=0),
        },
        rotate=lambda keys, _: keys,
        budget=torch.tensor([4]),
    )


@pytest.mark.parametrize("left", [0, 3])
def test_non_causal(left: int) -> None:
    scores = non_causal_scores(seen(left))
    torch.testing.assert_close(scores[0, 0, left:], torch.tensor(POOLED), atol=5e-6, rtol=0)
    z = standardized(scores, seen(left).positions >= 0)
    torch.testing.assert_close(z[0, 0, left:], torch.tensor(Z), atol=1e-5, rtol=0)


@pytest.mark.parametrize("left", [0, 3])
def test_compactor(left: int) -> None:
    scores = blended(seen(left), 48, 1e-2, 0.35, Forced())[0, 0, left:]
    torch.testing.assert_close(scores, torch.tensor(BLENDED), atol=1e-5, rtol=0)


def test_by_default_the_weight_is_the_part_that_is_evicted() -> None:
    default, half = (blended(seen(0), 48, 1e-2, weight, Forced()) for weight in (-1.0, 0.5))
    assert torch.equal(default, half)  # 4 of 8 entries


def received(layer: Layer, h: int, tokens: range) -> list[float]:
    """Attention times norm of these tokens, chunk by chunk, averaged over three neighbours."""
    head, queries = layer.heads[h], layer.query.split(len(layer.query) // len(layer.heads))[h]
    sums = torch.zeros(len(tokens), dtype=torch.float64)
    for start in range(0, len(tokens), CHUNK):
        own = list(tokens)[start : start + CHUNK]
        for query in queries:
            sums[start : start + CHUNK] += (query[own] @ head.keys[own].T).softmax(-1).sum(0)
    weighed = (sums / len(queries) * head.values[list(tokens)].norm(dim=-1)).tolist()
    padded = [0.0, *weighed, 0.0]
    return [sum(padded[i : i + 3]) / 3 for i in range(len(weighed))]


def leverage(head: Head, tokens: range) -> list[float]:
    rows = before_rope(head)[list(tokens)]
    rows = rows - rows.mean(0)
    inverse = (rows.T @ rows + 1e-2 * torch.eye(rows.shape[1]).double()).inverse()
    return [float(row @ inverse @ row) for row in rows]


def z(heads: list[list[float]]) -> Tensor:
    scores = torch.tensor(heads).double()
    return (scores - scores.mean()) / scores.std()


def non_causal(layers: list[Layer]) -> list[list[list[int]]]:
    return [
        [best(received(layer, h, range(len(head))), SMALL) for h, head in enumerate(layer.heads)]
        for layer in layers
    ]


def compactor(weight: float | None, first: int, last: int) -> Keep:
    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        kept = []
        for layer in layers:
            length = len(layer.heads[0])
            inner = range(first, length - last)
            share = 1 - SMALL / length if weight is None else weight
            both = share * z([leverage(head, inner) for head in layer.heads])
            both += z([received(layer, h, inner) for h in range(len(layer.heads))])
            ends = list(range(first)) + newest(layer.heads[0], last)
            kept.append([ends + [first + i for i in best(row, SMALL - len(ends))] for row in both])
        return kept

    return keep


@SHAPES
def test_entries_that_their_chunk_attends_to_stay(heads, lengths):
    assert_prefill(f"non_causal:chunk={CHUNK}", SMALL, heads, lengths, non_causal)


@pytest.mark.slow
@SHAPES
@pytest.mark.parametrize(
    ("spec", "weight", "first", "last"),
    [
        ("compactor", None, 8, 4),
        ("compactor:blending=0.35", 0.35, 8, 4),
        ("compactor_official:first=2,last=0", 0.5, 2, 0),
    ],
)
def test_both_scores_are_standardized_and_added(spec, weight, first, last, heads, lengths):
    spec += f"{',' if ':' in spec else ':'}chunk={CHUNK}"
    assert_prefill(spec, SMALL, heads, lengths, compactor(weight, first, last))


def test_options_out_of_range_are_refused() -> None:
    for spec in ("non_causal:chunk=0", "compactor:chunk=0", "compactor:jitter=0"):
        with pytest.raises(kvfold.KvfoldError, match="1"):
            kvfold.parse(spec)
    for spec in ("compactor:first=-1", "compactor:last=-1", "compactor:blending=-0.5"):
        with pytest.raises(kvfold.KvfoldError, match="0 or more"):
            kvfold.parse(spec)


def test_two_chunk_sizes_do_not_go_together() -> None:
    one, other = (kvfold.parse(f"non_causal:chunk={n}").stages().needs for n in (8, 16))
    with pytest.raises(kvfold.IllegalComposition, match="different chunks"):
        one.joined(other)
