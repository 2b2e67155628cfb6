# SPDX-License-Identifier: Apache-2.0
"""Every registered method, as it is, on a really trained model and a real text."""

from __future__ import annotations

import pytest
import torch

import kvfold
from tests.helpers.budgets import holds

pytestmark = pytest.mark.real

TOKENS, BUDGET, NEW = 512, 0.3, 6
# Of those that another method goes before, one composition; the rest stand alone.
AFTER_ANOTHER = {"every": "snapkv + every:interval=4", "merge": "h2o + merge:rule=d2o"}
# Released integers that overspend, and rounds, which fall below the budget and rise again.
OWN_COUNT = ("pyramidkv_official", "d2o_official", "every")


@pytest.mark.parametrize("name", kvfold.list_methods())
def test_a_method_answers_and_spends_its_budget(model, tokenizer, ids, name):
    spec = AFTER_ANOTHER.get(name, name)
    budget = BUDGET if kvfold.parse(spec).takes_budget else None
    cache = kvfold.CompressedCache(model, spec, budget, tokenizer=tokenizer)
    prompt = ids[:, :TOKENS]
    made = kvfold.generate(
        model,
        prompt,
        cache=cache,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert made.sequences.shape[1] == TOKENS + NEW
    assert all(logits.isfinite().all() for logits in made.logits)
    counts = torch.tensor(cache.stats().kept)
    seen = TOKENS + NEW - 1  # the last token generated was not read
    assert counts.max() <= seen and cache.get_seq_length() == seen
    if budget is not None and name not in OWN_COUNT:
        # KVzip compresses before the prompt's last token, which is read with the answer.
        read = TOKENS - 1 if name == "kvzip" else TOKENS
        added = 0 if holds(spec) else seen - read
        assert counts.sum() == counts.numel() * (int(BUDGET * read) + added)
