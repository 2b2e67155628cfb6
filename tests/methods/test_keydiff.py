# SPDX-License-Identifier: Apache-2.0
"""KeyDiff: keys that resemble the others least stay; golden vectors and padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.methods.keydiff import dissimilarity
from kvfold.methods.observation import Observation
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import PIECES, SHAPES, assert_prefill, per_head
from tests.helpers.observations import KEYS, D, T, observed
from tests.helpers.rounds import unlike


def best(scores: Tensor, count: int) -> set[int]:
    return set(scores.flatten().topk(count).indices.tolist())


@pytest.mark.parametrize("left", [0, 3])
def test_keydiff(left: int) -> None:
    scores = dissimilarity(observed(left=left))[0, 0, left:]
    expected = [0.266915, -0.547968, -0.297543, -0.945124, 0.449614, 0.672133, -0.211246, -0.276183]
    torch.testing.assert_close(scores, torch.tensor(expected), atol=2e-6, rtol=0)
    assert best(scores, 4) == {0, 4, 5, 6}


def test_a_key_of_zeros_is_neither_like_nor_unlike() -> None:
    keys = torch.cat([torch.zeros(1, D), KEYS[1:]])[None, None]
    scores = dissimilarity(Observation(keys, keys, torch.arange(T)[None, None]))
    assert scores[0, 0, 0] == 0 and not scores.isnan().any()


@PIECES
@SHAPES
def test_kept_entries(heads, lengths, chunk) -> None:
    assert_prefill("keydiff", SMALL, heads, lengths, per_head(unlike), chunk)
