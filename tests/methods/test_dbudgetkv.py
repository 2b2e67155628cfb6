# SPDX-License-Identifier: Apache-2.0
"""DBudgetKV: where its cut falls, and its options."""

import pytest
import torch

import kvfold
from kvfold import parse
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


def test_dbudgetkv_keeps_sinks_and_a_tail_of_each_row(model):
    counts, cache = kept(model, "dbudgetkv:threshold=0.2")
    assert counts[:2].tolist() == [[[64] * 2, [53] * 2, [24] * 2]] * 2
    assert counts[2:].unique().numel() > 2 and (counts[2:] < counts[:1]).any()
    for row, length in enumerate(LENGTHS):
        for layer in (2, 3):
            count = int(counts[layer, row, 0])
            places = cache.positions(layer)[row][0] - (64 - length)
            assert places.tolist() == [0, 1, 2, 3, *range(length - count + 4, length)]


def test_dbudgetkv_by_attention_keeps_the_last_and_the_best(model):
    counts, cache = kept(model, "dbudgetkv:threshold=0.2,ranking=attention,keep_layers=1")
    assert counts[1].tolist() == [[64] * 2, [53] * 2, [24] * 2]
    first, second = cache.positions(2)[0]
    assert len(first) == len(second) and first.tolist() != second.tolist()
    assert set(range(56, 64)) <= set(first.tolist())


def test_dbudgetkv_options_reach_the_cut(model):
    specs = ["", ",sinks=2", ",rows=3", ",include_sinks=true", ",threshold=0.3", ",keep_layers=2"]
    counts = [kept(model, f"dbudgetkv:threshold=0.2{more}")[0] for more in specs]
    assert len({tuple(c.flatten().tolist()) for c in counts}) == len(specs)
    for rows, ranking, window in ((1, "position", 1), (3, "position", 3), (3, "attention", 8)):
        needs = parse(f"dbudgetkv:rows={rows},ranking={ranking}").stages().needs
        assert needs.window == window
