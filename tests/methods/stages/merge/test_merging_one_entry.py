# SPDX-License-Identifier: Apache-2.0
"""Merging the one entry that leaves at a decode step is merging as in any eviction."""

import dataclasses
import itertools

import pytest
import torch

from kvfold.kernels.gather import take
from kvfold.methods.stages.merge.base import Eviction, Leaving
from kvfold.methods.stages.merge.most_similar import merge_one, merge_similar


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["softmax", "average", "official"])
@pytest.mark.parametrize("on", ["keys", "values"])
@pytest.mark.parametrize("decide", ["head", "head_mean"])
def test_one_entry_is_merged_as_in_an_eviction(weights, on, decide):
    options = {"weights": weights, "on": on, "decide": decide, "beta": 0.3}
    batch, heads, stored = 2, 4, 12
    keys, values = noise(batch, heads, stored, 5).float(), noise(batch, heads, stored, 6, seed=1)
    positions = torch.arange(stored).repeat(batch, heads, 1)
    positions[1, :, 0] = positions[0, :, 4] = -1  # padding, and an entry that is gone
    state = None
    merged = 0
    for step in range(20):
        if step == 3:
            state[1, 2] = torch.nan  # as if this head had not evicted yet
        slot = torch.randint(5, stored, (batch, heads, 1), generator=torch.manual_seed(step))
        stay = [
            [s for s in range(stored) if positions[b, h, s] >= 0 and s != slot[b, h, 0]]
            for b, h in itertools.product(range(batch), range(heads))
        ]
        slots = torch.tensor(stay).view(batch, heads, -1)
        kept_keys, kept_values, expected = merge_similar(
            Eviction(keys, values, positions, slots, state=state), **options
        )
        hidden = torch.zeros(positions.shape).masked_fill(positions < 0, -torch.inf)
        hidden.scatter_(2, slot, -torch.inf)
        leaving = Leaving(keys, values, hidden, slot, state)
        (change,) = merge_one([leaving], **options)
        compared = keys if on == "keys" else values
        norms, products = compared.norm(dim=-1), (compared @ take(compared, slot).mT)[..., 0]
        for known in ({"norms": norms}, {"norms": norms, "products": products.float()}):
            (given,) = merge_one([dataclasses.replace(leaving, **known)], **options)
            for name in ("slot", "keys", "values", "state"):
                found, computed = getattr(given, name), getattr(change, name)
                # Similarities are float32, whatever is weighed by them.
                torch.testing.assert_close(found, computed, rtol=1e-6, atol=1e-6)
            changed = given.keys if on == "keys" else given.values
            torch.testing.assert_close(given.norms, changed.norm(dim=-1).float())
        state = change.state
        torch.testing.assert_close(state, expected)
        merged += int((take(keys, change.slot) != change.keys).any(-1).sum())
        keys, values = keys.clone(), values.clone()
        for rows, new in ((keys, change.keys), (values, change.values)):
            rows.scatter_(2, change.slot[..., None].expand_as(new), new)
        torch.testing.assert_close(take(keys, slots), kept_keys)
        # Shares are of float32 similarities even of float64 values.
        torch.testing.assert_close(take(values, slots), kept_values, rtol=0, atol=1e-6)
    assert 0 < merged < 20 * batch * heads


@pytest.mark.parametrize("decide", ["head", "head_mean"])
def test_entries_of_several_layers_are_merged_as_those_of_each(decide):
    """Of other lengths; the first layers have no thresholds yet, or none of one head."""
    states = [None, torch.tensor([[0.3, torch.nan]] * 3), torch.full((3, 2), 0.1)]
    layers = []
    for seed, (stored, state) in enumerate(zip((7, 12, 7), states, strict=True)):
        keys, values = noise(3, 2, stored, 5, seed=seed).float(), noise(3, 2, stored, 5).float()
        slot = torch.tensor([[[1], [seed]]] * 3)
        hidden = torch.zeros(3, 2, stored).scatter_(2, slot, -torch.inf)
        layers.append(Leaving(keys, values, hidden, slot, state))
    alone = [change for layer in layers for change in merge_one([layer], decide=decide)]
    for got, expected in zip(merge_one(layers, decide=decide), alone, strict=True):
        assert torch.equal(got.slot, expected.slot)
        for name in ("keys", "values", "state"):
            torch.testing.assert_close(getattr(got, name), getattr(expected, name))
