# SPDX-License-Identifier: Apache-2.0
"""RoCo: its budget, and the tokens that it never evicts."""

import pytest
import torch

import kvfold
from tests.helpers.models import prompts
from tests.helpers.padded_prefill import LENGTHS, kept


@pytest.mark.parametrize(("decode", "grown"), [("hold", 0), ("append", 5)])
def test_roco_holds_its_budget_or_lets_tokens_come_on_top(model, decode, grown):
    ids, mask = prompts(LENGTHS)
    cache = kvfold.CompressedCache(model, f"roco:decode={decode}", 20)
    kvfold.generate(
        model,
        input_ids=ids,
        attention_mask=mask,
        cache=cache,
        max_new_tokens=6,
        do_sample=False,
    )
    assert torch.tensor(cache.stats().kept).eq(20 + grown).all()


def test_roco_never_evicts_its_last_tokens(model):
    for spec, protected in (("roco", 10), ("roco:protect_recent=30,protect_std_ratio=0.8", 30)):
        cache = kept(model, spec, 40)[1]
        for head in cache.positions(2)[0]:
            assert set(range(64 - protected, 64)) <= set(head.tolist())
    specs = [f"roco:protect_recent=0,protect_std_ratio={ratio}" for ratio in (0, 0.9)]
    sets = {str([h.tolist() for h in kept(model, spec, 40)[1].positions(2)[0]]) for spec in specs}
    assert len(sets) == 2
