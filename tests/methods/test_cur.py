# SPDX-License-Identifier: Apache-2.0
"""CUR: leverage of keys and values near their sum, by hand."""

from __future__ import annotations

import pytest
import torch

from kvfold.methods.cur import local_leverage
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import PIECES, SHAPES, SINKS, Head, assert_prefill, best, per_head
from tests.helpers.observations import observed


@pytest.mark.parametrize("left", [0, 3])
def test_cur(left: int) -> None:
    scores = local_leverage(observed(left=left), "kv_product", 4)[0, 0]
    expected = [0.197427, 0.050215, 0.078112, 0.175109, 0.122857, 0.223082, 0.083562, 0.069635]
    torch.testing.assert_close(scores[left:], torch.tensor(expected), atol=2e-6, rtol=0)
    assert not scores[:left].any()


def of_blocks(head: Head) -> list[int]:
    """The sinks, and the largest products of the shares in blocks of 16 entries."""
    scores = [1.0] * len(head)
    for entries in (head.keys, head.values):
        squares = entries.square().sum(-1).tolist()
        for i in range(len(head)):
            scores[i] *= squares[i] / sum(squares[i // 16 * 16 : i // 16 * 16 + 16])
    others = best(scores[SINKS:], SMALL - SINKS)
    return list(range(SINKS)) + [SINKS + place for place in others]


@PIECES
@SHAPES
def test_kept_entries(heads, lengths, chunk) -> None:
    assert_prefill("cur", SMALL, heads, lengths, per_head(of_blocks), chunk)
