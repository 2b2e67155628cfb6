# SPDX-License-Identifier: Apache-2.0
"""SnapKV: the entries that its last queries vote for, by hand."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold import KvfoldError
from kvfold.methods.stages.score.observation_window import candidate_votes
from kvfold.methods.stages.when import Rounds
from kvfold.observers.last_queries import window_of
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    PADDED,
    SHAPES,
    WINDOW,
    Head,
    assert_prefill,
    best,
    newest,
    per_head,
    pooled,
    with_window,
)
from tests.helpers.observations import observed
from tests.helpers.rounds import assert_each_round, per_full_head


@pytest.mark.slow
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


def by_largest_logits(head: Head) -> list[int]:
    """Shares among the entries before the window, of a KV head's largest logits; and the window."""
    largest = torch.stack(list(head.logits)).amax(0)[:, :-WINDOW]
    votes = torch.stack([row.softmax(-1) for row in largest]).mean(0)
    return best(pooled(votes.tolist(), 7, "max"), SMALL - WINDOW) + newest(head, WINDOW)


@pytest.mark.parametrize("interval", [3, 10])
@pytest.mark.parametrize("lengths", [PADDED, (17,)], ids=["padded", "short"])
def test_snapkv_decode_keeps_what_the_answer_s_largest_logits_share(lengths, interval):
    spec = f"snapkv_decode + every:interval={interval}"
    assert_each_round(spec, per_full_head(by_largest_logits), lengths, interval)


def test_snapkv_decode_evicts_after_128_tokens():
    stages = kvfold.parse("snapkv_decode").stages()
    assert stages.when == Rounds(128)
    assert window_of(stages.needs) == stages.forced.recent == 8


@pytest.mark.parametrize("left", [0, 3])
def test_votes_by_logits(left):
    expected = [0.185546, 0.165618, 0.162739, 0.171484, 0.158169, 0.156445]
    for kernel, votes in ((1, expected), (3, pooled(expected, 3, "max"))):
        found = candidate_votes(observed(2, left), 2, kernel, "max")[0, 0, left:]
        torch.testing.assert_close(found, torch.tensor([*votes, 0, 0]), atol=2e-6, rtol=0)


def test_votes_of_single_heads_and_of_the_largest_exclude_each_other():
    with pytest.raises(KvfoldError, match="no votes of single heads"):
        kvfold.parse("snapkv:votes=logits,pool_first=true")
