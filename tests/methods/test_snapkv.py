# SPDX-License-Identifier: Apache-2.0
"""SnapKV: the entries that its last queries vote for, by hand."""

from __future__ import annotations

import pytest

from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    SHAPES,
    WINDOW,
    assert_prefill,
    per_head,
    with_window,
)


@SHAPES
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("snapkv", {}),
        ("snapkv_official", {"kernel": 5, "pooling": "avg"}),
        ("snapkv_kvpress", {"kernel": 5, "pooling": "avg", "pool_first": True}),
        ("snapkv:pool_first=true", {"pool_first": True}),
    ],
)
def test_snapkv_keeps_what_the_last_queries_vote_for(name, options, heads, lengths):
    spec = f"{name}{',' if ':' in name else ':'}window={WINDOW}"
    keep = per_head(lambda head: with_window(head, SMALL, **options))
    assert_prefill(spec, SMALL, heads, lengths, keep)
