# SPDX-License-Identifier: Apache-2.0
"""R-KV: the published formulas' numbers, the matrix of all pairs in float64, rounds by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import KvfoldError
from kvfold.methods import rkv
from kvfold.methods.rkv import RKV, important_and_new
from kvfold.methods.stages.score import redundancy as module
from kvfold.methods.stages.score.redundancy import redundancy, shares
from kvfold.methods.stages.when import AtEnd, Rounds
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    PADDED,
    SHAPES,
    ByHand,
    Layer,
    assert_prefill,
)
from tests.helpers.models import build, prompts
from tests.helpers.observations import observe, observed
from tests.helpers.rounds import assert_each_round, last_queries, of_all_pairs, per_full_head
from tests.helpers.rounds import important_and_new as important_and_new_by_hand

# Eight keys; the fourth and the seventh are copies of each other, the others of none.
COPIED = [-0.187485, -0.064080, -0.091921, -0.084238, -0.174986, -0.199725, -0.165827, -0.094295]
UNCOPIED = {0: -0.154674, 3: -0.019926, 6: -0.101515}
SHARES = [0.118198, 0.133723, 0.130051, 0.131054, 0.119685, 0.116760, 0.120786, 0.129743]
SCORES = [-0.096936, -0.111374, -0.108944, -0.109876, -0.099303, -0.097515]


def close(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), atol=2e-6, rtol=0)


@pytest.mark.parametrize("tile", [1, 3, 128])
@pytest.mark.parametrize("left", [0, 3])
def test_redundancy(left, tile, monkeypatch):
    monkeypatch.setattr(module, "TILE", tile)
    seen = observed(left=left)
    found = redundancy(seen.keys, seen.positions, 0.5, retain=True, spare_first=True)
    close(found[0, 0, left:], COPIED)
    close(shares(found, seen.positions)[0, 0, left:], SHARES)
    plain = redundancy(seen.keys, seen.positions, 0.5, retain=False, spare_first=True)
    close(plain[0, 0, left:], [UNCOPIED.get(i, r) for i, r in enumerate(COPIED)])
    spared = redundancy(seen.keys, seen.positions, 0.5, retain=True, spare_first=False)
    close(spared[0, 0, left:], [UNCOPIED[0], *COPIED[1:]])


@pytest.mark.parametrize("left", [0, 3])
def test_scores_of_the_released_code(left):
    seen = observed(2, left)
    official = RKV(window=2, kernel=3, lam=0.07, spare_first=True)
    found = important_and_new(seen, official)[0, 0, left:]
    close(found[:6], SCORES)
    assert set(found[:6].topk(3).indices.tolist()) == {0, 4, 5}
    halves = important_and_new(seen, RKV(window=2, kernel=3, lam=0.5, spare_first=True))
    assert set(halves[0, 0, left : left + 6].topk(3).indices.tolist()) == {0, 1, 4}


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("spare_first", [True, False])
def test_tiles_are_the_matrix_of_all_pairs(retain, spare_first, monkeypatch):
    monkeypatch.setattr(module, "TILE", 7)
    lengths, options = (40, 40, 13), (0.5, retain, spare_first)
    seen = observe(lengths)
    found = redundancy(seen.keys, seen.positions, *options)
    for row, length in enumerate(lengths):
        for head, keys in enumerate(seen.keys[row, :, -length:]):
            expected = of_all_pairs(keys, *options)
            torch.testing.assert_close(
                found[row, head, -length:].double(), expected, atol=1e-6, rtol=0
            )


NAMES = pytest.mark.parametrize(
    ("name", "lam", "spare_first"), [("rkv", 0.1, False), ("rkv_official", 0.07, True)]
)


@pytest.mark.slow
@SHAPES
@NAMES
def test_prompts_by_hand(name, lam, spare_first, heads, lengths):
    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        for layer in layers:
            last_queries(layer)
        return [
            [important_and_new_by_hand(head, lam, spare_first) for head in layer.heads]
            for layer in layers
        ]

    assert_prefill(name, SMALL, heads, lengths, keep)


@pytest.mark.slow
@pytest.mark.cases(2)
@NAMES
@pytest.mark.parametrize("interval", [3, 10])
@pytest.mark.parametrize("lengths", [PADDED, (17,)], ids=["padded", "short"])
def test_rounds_by_hand(name, lam, spare_first, lengths, interval):
    rule = per_full_head(lambda head: important_and_new_by_hand(head, lam, spare_first))
    assert_each_round(f"{name} + every:interval={interval}", rule, lengths, interval)


@pytest.mark.parametrize("interval", [3, 10])
@pytest.mark.parametrize("lengths", [PADDED, (64,), (17,)], ids=["padded", "long", "short"])
def test_official_rounds_count_the_whole_text_by_hand(lengths, interval, monkeypatch):
    """In a batch they count the longest row, as the columns do."""
    monkeypatch.setattr(rkv, "INTERVAL", interval)
    keep = per_full_head(lambda head: important_and_new_by_hand(head, 0.07, True))

    def where_due(one: ByHand) -> None:
        one.prompt = getattr(one, "prompt", one.seen)
        columns = one.seen - one.prompt + max(lengths)
        if one.seen == one.prompt or columns % interval == 0:
            keep(one)

    assert_each_round("rkv_official", where_due, lengths, 1)


def test_official_rounds_count_the_whole_text_after_an_edit():
    model, ids = build("llama"), prompts((100,))[0]
    cache = kvfold.CompressedCache(model, "rkv_official", 60)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.drop((20, 30))
    assert cache.get_seq_length() == 90
    assert {state.next_round for state in cache.states} == {128}


def test_rounds_are_every_128_tokens_unless_asked_otherwise():
    stages = kvfold.parse("rkv").stages()
    assert stages.when == Rounds(128)
    assert kvfold.parse("rkv + every:interval=9").stages().interval == 9
    assert kvfold.parse("rkv:decode=append + kivi").stages().when == AtEnd()


@pytest.mark.parametrize("options", ["lam=1.5", "lam=nan", "threshold=-1", "window=0", "kernel=2"])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(KvfoldError):
        kvfold.parse(f"rkv:{options}")
