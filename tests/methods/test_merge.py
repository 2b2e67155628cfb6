# SPDX-License-Identifier: Apache-2.0
"""merge: what H2O evicts is merged by the rules of D2O and CaM."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    ALONE,
    HEADS,
    SHAPES,
    ByHand,
    assert_steps,
    h2o,
    merge_evicted,
    prompt_read,
    read_by_kvfold,
)
from tests.helpers.compositions import each_head, entries
from tests.helpers.models import continuation as steps_of


@pytest.mark.slow
@SHAPES
def test_what_h2o_evicts_is_merged(heads, lengths):
    def change(one: ByHand) -> None:
        for head in (head for layer in one.layers for head in layer.heads):
            if len(head) > SMALL:
                merge_evicted(head, h2o(head, SMALL))

    assert_steps("h2o + merge:rule=d2o", SMALL, heads, lengths, change)


@HEADS
def test_what_h2o_evicts_is_spread_or_not(heads):
    """21 tokens and a budget of 20: one value leaves each head, wholly or not at all."""
    lengths = (21, 21)
    held = read_by_kvfold("h2o + merge:rule=cam", SMALL, heads, lengths).cache
    before = [prompt_read(heads, lengths, row).layers for row in range(2)]
    outcomes = set()
    for layer, row, h in each_head(held):
        head = before[row][layer].heads[h]
        kept = sorted(h2o(head, SMALL))
        assert held.positions(layer)[row][h].tolist() == kept
        (gone,) = set(range(21)) - set(kept)
        keys, values = entries(held, layer, row, h)
        torch.testing.assert_close(keys, head.keys[kept])
        after = [slot for slot, place in enumerate(kept) if place > gone]
        gain = values - head.values[kept]
        spread = bool(gain.abs().max() > 1e-9)
        outcomes.add(spread)
        expected = torch.zeros_like(gain)
        expected[after] = spread * head.values[gone] / len(after)
        torch.testing.assert_close(gain, expected, rtol=0, atol=1e-9)
        chance = float(head.sums[gone] / head.sums[kept][after].mean())
        assert spread or 0 < chance < 1
    assert outcomes == {True, False} or heads == 1


def test_merging_leaves_moving_sinks_where_they_belong():
    """CaM changes no keys; the first layer's do not depend on values."""
    plain, spread = (
        read_by_kvfold(spec, SMALL, 2, ALONE)
        for spec in ("streaming_llm", "streaming_llm + merge:rule=cam")
    )
    for token in steps_of(1, 4).split(1, 1):
        plain(token), spread(token)
        first, second = (reader.cache.states[0] for reader in (plain, spread))
        # What has left may still lie in its place, and sinks where the last forward put them.
        first.settle_sinks(), second.settle_sinks()
        here, there = (layer.columns() >= 0 for layer in (first, second))
        assert torch.equal(first.stored().keys[here], second.stored().keys[there])
        assert not torch.equal(first.stored().values[here], second.stored().values[there])
