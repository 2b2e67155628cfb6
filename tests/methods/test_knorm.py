# SPDX-License-Identifier: Apache-2.0
"""KNorm: the keys of lowest norm stay, by hand."""

from __future__ import annotations

from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    SHAPES,
    Head,
    assert_prefill,
    best,
    per_head,
)


def knorm(head: Head, budget: int) -> list[int]:
    return best(-head.keys.norm(dim=-1), budget)


@SHAPES
def test_knorm_keeps_the_lowest_norms(heads, lengths):
    assert_prefill("knorm", SMALL, heads, lengths, per_head(lambda head: knorm(head, SMALL)))
