# SPDX-License-Identifier: Apache-2.0
"""One set of tokens for all heads, by each rule, against sets counted by hand."""

from __future__ import annotations

import pytest
import torch

from kvfold import BudgetError, KvfoldError
from kvfold.policies import Kept, policy
from tests.policies.test_method_policy import tensors


def kept(*heads: list[int], scores: list[list[float]], forced: tuple[int, ...] = ()) -> Kept:
    """Two layers of one head each, or one layer's heads, of six tokens."""
    always = torch.zeros(6, dtype=torch.bool)
    always[list(forced)] = True
    return Kept((tuple(map(torch.tensor, heads)),), 6, (torch.tensor(scores),), always)


SCORES = [[9.0, 0, 0, 0, 0, 1], [0, 4, 4, 0, 0, 2], [0, 0, 3, 3, 3, 1]]
ONE = kept([0, 5], [1, 2], [2, 3, 4], scores=SCORES)


def test_votes_count_the_heads_and_equal_ones_go_by_mass() -> None:
    assert ONE.counts.tolist() == [[2, 2, 3]]
    assert ONE.shared("votes").tolist() == [0, 2]
    assert ONE.shared("votes", 1).tolist() == [2]
    assert ONE.shared("votes", 4).tolist() == [0, 1, 2, 5]


def test_mass_sums_shares_of_scores() -> None:
    # Shares: 0.9 of token 0; 0.4 and 0.4; 0.3 each of 2, 3, 4; 0.1, 0.2 and 0.1 of token 5.
    assert ONE.shared("mass", 1).tolist() == [0]
    assert ONE.shared("mass", 2).tolist() == [0, 2]
    assert ONE.shared("mass", 4).tolist() == [0, 1, 2, 5]
    assert ONE.shared().tolist() == ONE.shared("mass", 2).tolist()


def test_scores_below_zero_are_counted_from_the_lowest() -> None:
    shifted = [[score - 7 for score in head] for head in SCORES]
    other = kept([0, 5], [1, 2], [2, 3, 4], scores=shifted)
    for size in range(1, 6):
        assert torch.equal(other.shared("mass", size), ONE.shared("mass", size))


def test_union_holds_what_any_head_keeps() -> None:
    assert ONE.shared("union").tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(KvfoldError, match="leave size out"):
        ONE.shared("union", 3)


def test_forced_tokens_come_first() -> None:
    held = kept([0, 5], [1, 5], [2, 5], scores=SCORES, forced=(5,))
    assert held.shared("mass", 1).tolist() == [5]
    assert held.shared("votes", 2).tolist() == [0, 5]
    assert held.shared("mass", 2).tolist() == [0, 5]
    with pytest.raises(BudgetError, match="1 of 6 always stay"):
        held.shared("mass", 0)


def test_sizes_and_rules_are_checked() -> None:
    with pytest.raises(BudgetError):
        ONE.shared("votes", 7)
    with pytest.raises(KvfoldError, match="no rule"):
        ONE.shared("loudest")  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["votes", "mass"])
def test_one_set_has_the_mean_size_and_the_forced_tokens(rule: str) -> None:
    whole = tensors(4, 150)
    held = policy("snapkv:window=8 + adakv").keep(whole, 30)
    assert held.shared(rule).tolist()[-8:] == list(range(142, 150))
    assert len(held.shared(rule)) == 30
    assert held.shared(rule).unique().numel() == 30


@pytest.mark.parametrize("spec", ["streaming_llm", "local_window"])
def test_heads_that_agree_share_their_own_set(spec: str) -> None:
    held = policy(spec).keep(tensors(4, 64), 20)
    for rule in ("votes", "mass", "union"):
        assert torch.equal(held.shared(rule), held.indices[0][0])


def test_nothing_is_evicted_where_everything_fits() -> None:
    held = policy("keydiff").keep(tensors(4, 64), 64)
    assert held.mask().all()
    for rule in ("votes", "mass", "union"):
        assert held.shared(rule).tolist() == list(range(64))
