# SPDX-License-Identifier: Apache-2.0
"""Leverage: the keys that others span least, by hand on keys before RoPE."""

from __future__ import annotations

import pytest
import torch

import kvfold
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import SHAPES, Head, assert_prefill, best, per_head
from tests.helpers.by_hand import before_rope as unrotated


def leverage(head: Head) -> list[float]:
    """x (XᵀX + I/100)⁻¹ xᵀ of every centred key."""
    rows = unrotated(head) - unrotated(head).mean(0)
    inverse = (rows.T @ rows + 1e-2 * torch.eye(rows.shape[1], dtype=rows.dtype)).inverse()
    return [float(row @ inverse @ row) for row in rows]


@pytest.mark.slow
@SHAPES
def test_keys_that_others_span_least_stay(heads, lengths):
    keep = per_head(lambda head: best(leverage(head), SMALL))
    assert_prefill("leverage", SMALL, heads, lengths, keep)


def test_a_projection_is_fixed_by_the_seed(model):
    ids = torch.arange(5, 69)[None]
    kept = []
    for seed in (0, 0, 1):
        cache = kvfold.CompressedCache(model, "leverage:sketch=3", SMALL, seed=seed)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        kept.append([head.tolist() for head in cache.positions(1)[0]])
    assert kept[0] == kept[1] != kept[2]


@pytest.mark.parametrize("options", ["sketch=0", "jitter=0", "jitter=nan"])
def test_options_out_of_range_are_refused(options: str) -> None:
    with pytest.raises(kvfold.KvfoldError, match=f"leverage:{options.partition('=')[0]} is "):
        kvfold.parse(f"leverage:{options}")
