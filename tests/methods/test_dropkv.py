# SPDX-License-Identifier: Apache-2.0
"""DropKV: how much the output changes where an entry is removed, against a naive loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.methods.dropkv import removal_change
from kvfold.methods.observation import Observation
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    PIECES,
    SHAPES,
    WINDOW,
    Head,
    assert_prefill,
    best,
    newest,
    per_head,
    pooled,
)
from tests.helpers.observations import KEYS, QUERIES, VALUES, D, T, observed


@pytest.mark.parametrize("left", [0, 2])
def test_dropkv_is_what_removal_changes(left: int) -> None:
    scores = removal_change(observed(window=2, left=left), window=2, kernel=1)[0, 0, left:]
    expected = [0.268514, 0.101282, 0.158959, 0.221508, 0.219619, 0.256549, 0.222176, 0.077826]
    torch.testing.assert_close(scores, torch.tensor(expected), atol=5e-6, rtol=0)
    torch.testing.assert_close(scores, by_removal(), atol=1e-5, rtol=0)


def by_removal() -> Tensor:
    """The same by leaving each entry out."""
    changes = torch.zeros(T)
    for at in (6, 7):
        logits = (KEYS[: at + 1] @ QUERIES[at]) / 2
        whole = logits.softmax(0) @ VALUES[: at + 1]
        for left_out in range(at + 1):
            rest = [i for i in range(at + 1) if i != left_out]
            changes[left_out] += (logits[rest].softmax(0) @ VALUES[rest] - whole).square().sum()
    return changes


def test_an_entry_that_takes_all_attention_is_finite() -> None:
    keys = torch.zeros(1, 1, 4, D)
    keys[..., 1, :] = 1e4
    values = torch.randn(1, 1, 4, D, generator=torch.Generator().manual_seed(0))
    seen = Observation(
        keys, values, torch.arange(4)[None, None], torch.ones(1, 1, 1, D), torch.tensor([[3]])
    )
    assert removal_change(seen, window=1, kernel=1).isfinite().all()


def missed(head: Head) -> list[int]:
    """The window, and the entries without which its outputs change most."""
    changes = torch.zeros(len(head), dtype=torch.float64)
    for rows in head.rows:
        for row in rows[-WINDOW:]:
            without = row.expand(len(head), -1).clone().fill_diagonal_(0)
            without /= without.sum(-1, keepdim=True)
            changes += (without @ head.values - row @ head.values).square().sum(-1)
    scores = pooled((changes / len(head.rows)).tolist(), 7, "avg")
    return best(scores[:-WINDOW], SMALL - WINDOW) + newest(head, WINDOW)


@pytest.mark.slow
@PIECES
@SHAPES
def test_kept_entries(heads, lengths, chunk) -> None:
    spec = f"dropkv:window={WINDOW}"
    assert_prefill(spec, SMALL, heads, lengths, per_head(missed), chunk)
