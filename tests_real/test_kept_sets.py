# SPDX-License-Identifier: Apache-2.0
"""Kept entries of a real text: each method's rule as loops in float64, on attention written out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvfold
from kvfold import CompressedCache
from tests.helpers.by_hand import (
    WINDOW,
    ByHand,
    Head,
    Keep,
    Layer,
    adaptive,
    assert_holds,
    best,
    evict,
    first_and_newest,
    h2o,
    newest,
    per_head,
    pyramid,
    rows_of_layer,
    votes,
    with_window,
)
from tests.helpers.kvzip_by_hand import kept_by_score, most_attention
from tests.helpers.truth import Reader

pytestmark = pytest.mark.real

TOKENS, BUDGET = 320, 80


@pytest.fixture(scope="module")
def read(truth: Any, ids: Tensor) -> ByHand:
    """The text, read by hand; copy it before anything is taken out of it."""
    return ByHand(truth)(ids[:, :TOKENS], logits_to_keep=1)


def pyramid_keep(layers: list[Layer]) -> list[list[list[int]]]:
    sizes = pyramid(TOKENS, BUDGET, 20, len(layers))
    return [
        [with_window(head, size) for head in layer.heads]
        for layer, size in zip(layers, sizes, strict=True)
    ]


def adakv_keep(layers: list[Layer]) -> list[list[list[int]]]:
    kept = []
    for layer in layers:
        counts = adaptive([votes(head) for head in layer.heads], BUDGET - WINDOW, 0.2)
        kept.append([with_window(h, n + WINDOW) for h, n in zip(layer.heads, counts, strict=True)])
    return kept


def tova_keep(layers: list[Layer]) -> list[list[list[int]]]:
    """What the newest query of all heads together attends to."""
    rows = [rows_of_layer(layer)[:, -1].mean(0) for layer in layers]
    return [
        [best(row, BUDGET) for _ in layer.heads] for layer, row in zip(layers, rows, strict=True)
    ]


def roco(head: Head, recent: int = 10, ratio: float = 0.3) -> list[int]:
    """The newest and the unstable stay before those of highest mean."""
    mean = head.sums / head.queries
    variance = (head.squares / head.queries - mean.square()).clamp(min=0)
    variance[-recent:] = torch.inf
    unstable = best(variance, int(ratio * BUDGET) + 1)
    mean[unstable] = torch.inf
    return best(mean, BUDGET)


RULES: dict[str, Keep] = {
    "local_window": per_head(lambda head: newest(head, BUDGET)),
    "streaming_llm_original": per_head(lambda head: first_and_newest(head, BUDGET)),
    "tova": tova_keep,
    "h2o": per_head(lambda head: h2o(head, BUDGET)),
    "roco": per_head(roco),
    f"snapkv:window={WINDOW}": per_head(lambda head: with_window(head, BUDGET)),
    f"snapkv_kvpress:window={WINDOW}": per_head(
        lambda head: with_window(head, BUDGET, kernel=5, pooling="avg", pool_first=True)
    ),
    f"pyramidkv:window={WINDOW}": pyramid_keep,
    f"adakv:window={WINDOW}": adakv_keep,
}


@pytest.mark.parametrize("spec", RULES)
def test_kept_entries_are_those_of_the_rule(exact, ids, read, spec):
    cache = CompressedCache(exact, spec, BUDGET)
    Reader(exact, cache)(ids[:, :TOKENS], logits_to_keep=1)
    assert_holds(cache, [evict(copy.deepcopy(read), RULES[spec])])


def keydiff(head: Head) -> Tensor:
    directions = head.keys / head.keys.norm(dim=-1, keepdim=True)
    return -directions @ nn.functional.normalize(directions.mean(0), dim=-1)


@pytest.mark.parametrize(
    ("spec", "score", "tie"),
    [
        # A token's keys have one norm in the first layer, wherever it stands, but for rounding.
        ("knorm", lambda head: -head.keys.norm(dim=-1).log(), 1e-6),
        ("keydiff", keydiff, 1e-6),
    ],
    ids=["knorm", "keydiff"],
)
def test_of_scores_with_ties_the_best_stay(exact, ids, read, spec, score, tie):
    """Entries above the last one that fits stay, none below does, of equal ones any.

    Both methods score in float32.
    """
    cache = CompressedCache(exact, spec, BUDGET)
    Reader(exact, cache)(ids[:, :TOKENS], logits_to_keep=1)
    tied = 0
    for index, layer in enumerate(read.layers):
        for found, head in zip(cache.positions(index)[0], layer.heads, strict=True):
            scores = score(head)
            border = scores.sort(descending=True).values[BUDGET - 1]
            kept = set(found.tolist())
            assert len(kept) == BUDGET
            assert set((scores > border + tie).nonzero()[:, 0].tolist()) <= kept
            assert kept <= set((scores >= border - tie).nonzero()[:, 0].tolist())
            tied += int(((scores - border).abs() <= tie).sum()) - 1
    assert tied < 0.01 * TOKENS * len(read.layers)


def mass(layer: Layer, window: int = 64) -> float:
    """Attention of the newest query to sinks and window, over all query heads."""
    row = rows_of_layer(layer)[:, -1].mean(0)
    return float(row[:4].sum() + row[-window:].sum())


def test_simlayerkv_trims_the_lazy_layers(exact, ids, read):
    masses = sorted(mass(layer) for layer in read.layers)
    lazy = len(masses) - len(masses) // 2
    threshold = (masses[-lazy - 1] + masses[-lazy]) / 2
    cache = CompressedCache(exact, f"simlayerkv:window=64,threshold={threshold!r}")
    Reader(exact, cache)(ids[:, :TOKENS], logits_to_keep=1)

    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        sizes = [68 if mass(layer) > threshold else TOKENS for layer in layers]
        return [
            [first_and_newest(head, size) for head in layer.heads]
            for layer, size in zip(layers, sizes, strict=True)
        ]

    assert_holds(cache, [evict(copy.deepcopy(read), keep)])
    lengths = [layer[0][0] for layer in cache.stats().kept]
    assert set(lengths) == {68, TOKENS} and lengths.count(68) == lazy


def test_kvzip_keeps_what_repeating_the_text_attends_to(exact, truth, tokenizer, text, slides):
    """With its repetition the text is longer than windows that slide."""
    context = kvfold.compress(exact, tokenizer, text[: 1500 if slides else 700], "kvzip", 0.3)
    opening = tokenizer(context.frame.before, add_special_tokens=False).input_ids
    request = "\n\nRepeat the previous context exactly." + context.frame.after
    tokens, prefix = context.ids[0].tolist(), len(opening)
    new = [*tokenizer(request, add_special_tokens=False).input_ids, *tokens[prefix:]]
    one = ByHand(truth)(torch.tensor([tokens + new]), logits_to_keep=1)
    scored = range(prefix, len(tokens))
    scores = [
        [most_attention(layer, head, prefix, scored, len(new)) for head in range(len(layer.heads))]
        for layer in one.layers
    ]
    kept = kept_by_score(scores, int(0.3 * len(scored)), prefix)
    for layer, expected in enumerate(kept):
        found = [head.tolist() for head in context.cache.positions(layer)[0]]
        assert found == [sorted(head) for head in expected], f"layer {layer}"
