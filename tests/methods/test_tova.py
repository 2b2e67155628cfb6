# SPDX-License-Identifier: Apache-2.0
"""TOVA: the entry that the newest query attends to least is evicted, by hand."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    SHAPES,
    ByHand,
    assert_steps,
    best,
)


@pytest.mark.slow
@SHAPES
def test_tova_drops_what_the_newest_query_attends_to_least(heads, lengths):
    def change(one: ByHand) -> None:
        for layer in one.layers:
            row = torch.stack([head.rows[:, -1] for head in layer.heads]).flatten(0, 1).mean(0)
            for head in layer.heads:
                head.keep(best(row, SMALL))

    assert_steps("tova", SMALL, heads, lengths, change)
