# SPDX-License-Identifier: Apache-2.0
"""AdaKV: which entries each head keeps, and its options."""

import pytest
import torch

import kvfold
from tests.helpers.models import build, prompts

LENGTHS = (64, 53, 24)


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64)


def kept(model, spec, budget=None):
    """Entries after a padded prefill: `[L][B][H]`."""
    ids, mask = prompts(LENGTHS)
    cache = kvfold.CompressedCache(model, spec, budget)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    return torch.tensor(cache.stats().kept), cache


@pytest.mark.parametrize("spec", ["adakv:window=8", "adakv:window=8,normalize=true"])
def test_adakv_spends_exactly_a_layer_s_budget(model, spec):
    counts, cache = kept(model, spec, 20)
    assert counts.sum(-1).eq(40).all()
    assert counts.min() >= 8 + int(12 * 0.2)
    assert counts.unique().numel() > 4
    newest = set(range(56, 64))
    assert all(newest <= set(head.tolist()) for head in cache.positions(1)[0])


def test_adakv_with_a_floor_of_one_is_snapkv(model):
    ours, theirs = (
        kept(model, spec, 20)[1] for spec in ("adakv:window=8,floor=1", "snapkv:window=8")
    )
    for layer in range(4):
        for row in range(3):
            for a, b in zip(ours.positions(layer)[row], theirs.positions(layer)[row], strict=True):
                assert a.tolist() == b.tolist()


def test_adakv_options_reach_the_allocation(model):
    specs = ["", ",floor=0.9", ",rule=blend", ",normalize=true"]
    counts = [kept(model, f"adakv:window=8{more}", 20)[0].flatten().tolist() for more in specs]
    assert len(set(map(tuple, counts))) == len(specs)


def test_adakv_shares_another_method_s_budgets_among_heads(model):
    pyramid = kept(model, "pyramidkv:window=8", 20)[0]
    shared = kept(model, "pyramidkv:window=8 + adakv", 20)[0]
    assert torch.equal(shared.sum(-1), pyramid.sum(-1))
    assert not torch.equal(shared, pyramid)
