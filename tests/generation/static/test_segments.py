# SPDX-License-Identifier: Apache-2.0
"""Layers of segments while captured steps decode."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.attention import handshake
from kvfold.cache.encode import encode_due
from kvfold.generation.static.segments import StaticSegments, steps_until_due
from tests.helpers.budgets import compressed
from tests.helpers.compiled import ALONE, ENCODED, GREEDY, PADDED, small
from tests.helpers.models import prompts


def filled(spec: str, lengths: tuple[int, ...] = ALONE) -> kvfold.CompressedCache:
    """A cache that has read prompts of these lengths."""
    model, (ids, mask) = small("llama"), prompts(lengths)
    cache = compressed(model, spec)
    kvfold.generate(
        model, ids, cache=cache, attention_mask=mask, **(GREEDY | {"max_new_tokens": 1})
    )
    return cache


@pytest.mark.parametrize("lengths", [ALONE, PADDED])
@pytest.mark.parametrize("spec", [*ENCODED[:2], "adakv:window=8 + kivi:group=8,residual=8"])
def test_a_layer_is_made_anew_when_entries_are_due(spec, lengths):
    """The steps foretold are those after which the eager layer encodes for the first time."""
    state = filled(spec, lengths).compressed_layers[0].state
    foretold, taken = steps_until_due(state, 200), 0
    keys = state.ragged_store().keys.new_zeros(len(lengths), 2, 1, 8)
    parts = state.ragged_store().segments()
    before = parts.keys.encoded, parts.values.encoded
    while taken < 200:
        taken += 1
        state.append(keys, keys)
        encode_due(state, decoding=True)
        parts = state.ragged_store().segments()
        encoded = parts.keys.encoded, parts.values.encoded
        if encoded[0] is not before[0] or encoded[1] is not before[1]:
            break
    assert taken == foretold < 200


def test_raw_segments_have_room_for_all_that_was_asked():
    layer = filled("adakv:window=8").compressed_layers[0]
    static = StaticSegments(layer, 9)
    assert static.room == static.keys.shape[2] == 9
    counted: set[int] = set()
    assert static.nbytes(counted) > sum(layer.state.ragged_store().nbytes(set())[:1])
    assert static.nbytes(counted) == 0  # tensors that layers share count once


def test_new_entries_stand_where_the_store_takes_them():
    layer = filled("adakv:window=8").compressed_layers[0]
    static, store = StaticSegments(layer, 9), layer.state.ragged_store()
    old = store.dense()[0].clone()
    new = torch.randn(1, 2, 1, 8, generator=torch.Generator().manual_seed(5))
    static.update(new, new)
    handshake.forget()
    assert int(static.get_seq_length()) == layer.state.seen + 1
    static.hand_back(layer)
    assert torch.equal(store.dense()[0], torch.cat([old, new], 2))
