# SPDX-License-Identifier: Apache-2.0
"""NACL: the best by the proxies' attention, and a draw among the others."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

import kvfold
from kvfold.methods.nacl import best_and_drawn
from kvfold.methods.observation import Observation
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    SHAPES,
    WINDOW,
    Head,
    assert_prefill,
    per_head,
    read_by_kvfold,
    with_window,
)

SPEC = f"nacl:proxies={WINDOW}"


def summed(head: Head, count: int) -> list[int]:
    """The proxies' own entries and the best of the others."""
    return with_window(head, count, kernel=1)


@SHAPES
def test_without_a_draw_it_is_snapkv_without_pooling(heads, lengths):
    keep = per_head(lambda head: summed(head, SMALL))
    assert_prefill(f"{SPEC},random=0", SMALL, heads, lengths, keep)
    assert_prefill(f"snapkv:window={WINDOW},kernel=1", SMALL, heads, lengths, keep)


@SHAPES
def test_the_best_stay_beside_the_draw(heads, lengths):
    """A fifth of 20: the proxies, the 8 best, and 4 others."""
    drawn = read_by_kvfold(f"{SPEC},random=0.2", SMALL, heads, lengths).cache
    plain = read_by_kvfold(f"{SPEC},random=0", SMALL - 4, heads, lengths).cache
    ranked = read_by_kvfold(f"{SPEC},random=0", SMALL, heads, lengths).cache
    beyond = 0
    for layer in range(len(drawn.states)):
        for row in range(len(lengths)):
            for head in range(heads):
                kept, best, more = (
                    set(cache.positions(layer)[row][head].tolist())
                    for cache in (drawn, plain, ranked)
                )
                assert best <= kept and len(kept) == SMALL
                beyond += kept != more
    assert beyond > 0.8 * len(drawn.states) * len(lengths) * heads


def test_the_seed_fixes_the_draw(model):
    ids = torch.arange(5, 69)[None]
    kept = []
    for seed in (0, 0, 1):
        cache = kvfold.CompressedCache(model, f"{SPEC},random=0.5", SMALL, seed=seed)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        kept.append([head.tolist() for head in cache.positions(1)[0]])
    assert kept[0] == kept[1] != kept[2]


SCORES = [5.0, 1.0, 2.0, 0.0, 1.5]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_chances_are_those_of_a_softmax(temperature: float) -> None:
    """One draw beside the best entry, in as many heads as there are trials."""
    trials = 20_000
    scores = torch.tensor(SCORES).expand(1, trials, 5)
    positions = torch.arange(5).expand(1, trials, 5)
    seen = Observation(scores[..., None], scores[..., None], positions, seed=3)
    none = torch.zeros_like(scores, dtype=torch.bool)
    counts = torch.full((1, trials), 2)
    slots = best_and_drawn(seen, scores, none, positions, counts, 0.5, temperature)
    assert bool((slots[..., 0] == 0).all())
    found = Counter(slots[0, :, 1].tolist())
    weights = [math.exp(s / temperature) if temperature else 1.0 for s in SCORES[1:]]
    for slot, weight in enumerate(weights, 1):
        chance = weight / sum(weights)
        spread = math.sqrt(chance * (1 - chance) / trials)
        assert found[slot] / trials == pytest.approx(chance, abs=5 * spread)


def test_kvcache_factory_s_numbers_without_a_draw() -> None:
    """Proxies 4 and 5 of six entries, a budget of 4: the two best of the others beside them."""
    scores = torch.tensor([[[0.1, 0.9, 0.2, 0.8, 0.3, 0.4]]])
    positions = torch.arange(6)[None, None]
    seen = Observation(scores[..., None], scores[..., None], positions)
    counts = torch.tensor([[4]])
    slots = best_and_drawn(seen, scores, positions >= 4, positions, counts, 0.0, 1.0)
    assert slots[0, 0].tolist() == [1, 3, 4, 5]


def test_a_budget_of_the_proxies_alone_draws_nothing():
    cache = read_by_kvfold(f"{SPEC},random=1", WINDOW, 2, (64,)).cache
    assert cache.positions(0)[0][0].tolist() == list(range(56, 64))


@pytest.mark.parametrize("options", ["random=1.1", "random=-0.1", "temperature=-1", "random=nan"])
def test_options_out_of_range_are_refused(options: str) -> None:
    with pytest.raises(kvfold.KvfoldError, match=rf"nacl:{options.partition('=')[0]} is .*, not "):
        kvfold.parse(f"nacl:{options}")


def test_proxies_are_at_least_one() -> None:
    with pytest.raises(kvfold.KvfoldError, match="at least 1 query"):
        kvfold.parse("nacl:proxies=0")
