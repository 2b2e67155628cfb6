# SPDX-License-Identifier: Apache-2.0
"""ChunkKV: whole chunks stay, and the next one in part."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.methods.chunkkv import whole_chunks
from kvfold.methods.keydiff import dissimilarity
from kvfold.methods.observation import Observation
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    PIECES,
    SHAPES,
    WINDOW,
    Layer,
    assert_prefill,
    best,
    newest,
    votes,
)
from tests.helpers.models import build

CHUNKED = torch.tensor(
    [[[0.1, 0.9, 0.2, 0.2, 0.3, 0.3, 0.05], [0.2, 0.1, 0.4, 0.4, 0.1, 0.1, 0.6]]]
)


def chunks(count: int, shared: bool, *forced: int) -> list[list[int]]:
    positions = torch.arange(7).expand(1, 2, 7)
    must = torch.zeros(1, 2, 7, dtype=torch.bool)
    must[..., list(forced)] = True
    counts = torch.full((1, 2), count)
    seen = Observation(CHUNKED[..., None], CHUNKED[..., None], positions)
    slots = whole_chunks(seen, CHUNKED, must, positions, counts, length=3, shared=shared)
    return slots[0].tolist()


def test_whole_chunks_stay_and_the_next_one_in_part() -> None:
    assert chunks(1, True) == [[6], [6]]
    assert chunks(4, True) == [[0, 1, 2, 6]] * 2
    # {3, 4, 5} holds .6, .4, .4 of both heads.
    assert chunks(5, True) == [[0, 1, 2, 3, 6]] * 2


def test_heads_may_choose_chunks_by_themselves() -> None:
    # Means .4, .2667, .05 and .2333, .2, .6.
    assert chunks(3, False) == [[0, 1, 2], [0, 2, 6]]


def test_forced_entries_take_room_first_and_no_part_in_their_chunk() -> None:
    # Without 1, the first chunk's mean is (.3 + .6) / 2 = .45, below .4667 of the second.
    assert chunks(5, True, 1) == [[1, 3, 4, 5, 6]] * 2


def test_heads_that_hold_different_tokens_agree_on_chunks() -> None:
    """A chunk's mean is that of its positions, which lie in other slots of each head."""
    held = torch.tensor([[[0, 1, 3, 4, 6, 7], [-1, 0, 2, 3, 7, 8]]])
    scores = torch.tensor([[[0.1, 0.2, 0.9, 0.8, 0.1, 0.3], [5.0, 0.1, 0.2, 0.7, 0.2, 0.1]]])
    by_hand = [(0.1 + 0.2 + 0.1 + 0.2) / 4, (0.9 + 0.8 + 0.7) / 3, (0.1 + 0.3 + 0.2 + 0.1) / 4]
    assert sorted(range(3), key=lambda chunk: -by_hand[chunk]) == [1, 2, 0]
    seen = Observation(scores[..., None], scores[..., None], held)
    none = torch.zeros(1, 2, 6, dtype=torch.bool)
    for count, kept in ((2, [{3, 4}, {3, 7}]), (4, [{3, 4, 6, 7}, {2, 3, 7, 8}])):
        counts = torch.full((1, 2), count)
        slots = whole_chunks(seen, scores, none, held, counts, length=3, shared=True)[0]
        assert [{*held[0, h, slots[h]].tolist()} for h in range(2)] == kept


def test_tokens_that_few_heads_hold_are_not_preferred_by_scores_below_zero() -> None:
    held = torch.tensor([[[0, 1, 2, 3, 4, 5, 6, 7], [-1, -1, -1, -1, 4, 5, 6, 7]]])
    scores = torch.tensor([[[-3.0] * 4 + [-2.0] * 4, [0.0] * 4 + [-2.0] * 4]])
    seen = Observation(scores[..., None], scores[..., None], held)
    none = torch.zeros(1, 2, 8, dtype=torch.bool)
    for length in (4, 8):  # the better chunk; then the better tokens of one chunk
        counts = torch.tensor([[4, 4]])
        slots = whole_chunks(seen, scores, none, held, counts, length=length, shared=True)
        assert slots.tolist() == [[[4, 5, 6, 7]] * 2]


@pytest.mark.slow
@torch.no_grad()
def test_rows_choose_their_own_chunks_and_spend_the_whole_budget() -> None:
    model = build("llama")
    ids = torch.randint(5, 190, (2, 90), generator=torch.Generator().manual_seed(1))
    both = kvfold.CompressedCache(model, "chunkkv:window=8,length=7", 37)
    model(ids, past_key_values=both)
    for row in range(2):
        alone = kvfold.CompressedCache(model, "chunkkv:window=8,length=7", 37)
        model(ids[row : row + 1], past_key_values=alone)
        for layer in range(len(both.states)):
            for one, other in zip(
                both.positions(layer)[row], alone.positions(layer)[0], strict=True
            ):
                assert len(one) == 37 and torch.equal(one, other)


def test_chunks_go_with_any_score_but_not_with_eviction_while_decoding() -> None:
    assert kvfold.parse("knorm + chunkkv").stages().select is not None
    assert kvfold.parse("keydiff + chunkkv:length=10").stages().score is dissimilarity
    with pytest.raises(kvfold.IllegalComposition, match="while decoding"):
        kvfold.parse("h2o + chunkkv").stages()


LENGTH = 7


def best_chunks(scores: list[float]) -> list[int]:
    """Whole chunks by their mean score, and the best tokens of the one that does not fit."""
    chunks = [
        list(range(first, min(first + LENGTH, len(scores))))
        for first in range(0, len(scores), LENGTH)
    ]
    means = [sum(scores[i] for i in chunk) / len(chunk) for chunk in chunks]
    kept: list[int] = []
    for place in best(means, len(chunks)):
        chunk = chunks[place]
        in_order = [chunk[i] for i in best([scores[i] for i in chunk], len(chunk))]
        kept += in_order[: SMALL - WINDOW - len(kept)]
    return kept


def of_layer(layer: Layer, shared: bool) -> list[list[int]]:
    own = [votes(head, kernel=1) for head in layer.heads]
    if shared:
        own = [[sum(column) for column in zip(*own, strict=True)]] * len(own)
    heads = zip(layer.heads, own, strict=True)
    return [best_chunks(scores) + newest(head, WINDOW) for head, scores in heads]


@pytest.mark.slow
@PIECES
@pytest.mark.parametrize("shared", [True, False])
@SHAPES
def test_kept_entries(heads, lengths, shared, chunk) -> None:
    spec = f"chunkkv:window={WINDOW},length={LENGTH},shared={shared}"
    assert_prefill(
        spec, SMALL, heads, lengths, lambda layers: [of_layer(x, shared) for x in layers], chunk
    )
