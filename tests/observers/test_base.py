# SPDX-License-Identifier: Apache-2.0
"""Needs: a set joined by type, and the names that they had before."""

from __future__ import annotations

import pytest
import torch

from kvfold.errors import IllegalComposition, KvfoldError
from kvfold.methods.observation import Observation
from kvfold.observers.base import Needs
from kvfold.observers.column_sums import ColumnSquares, ColumnSums
from kvfold.observers.last_queries import LastQueries, window_of
from kvfold.observers.query_moments import QueryMomentsNeed
from kvfold.observers.stored import KeysBeforeRope, OutputNorms, TokenIds
from kvfold.observers.surprise import SurpriseNeed


def test_needs_are_a_set_whatever_their_order() -> None:
    assert Needs(TokenIds(), LastQueries(3)) == Needs(LastQueries(3), TokenIds())
    assert Needs(None, LastQueries(0)) == Needs()
    assert TokenIds in Needs(TokenIds()) and TokenIds not in Needs(ColumnSums())


def test_needs_of_two_methods_are_joined_by_their_type() -> None:
    joined = Needs(LastQueries(3), ColumnSums()).joined(Needs(LastQueries(8), TokenIds()))
    assert joined == Needs(LastQueries(8), ColumnSums(), TokenIds())
    with pytest.raises(IllegalComposition, match="L1 norms"):
        Needs(OutputNorms("l1")).joined(Needs(OutputNorms("l2")))


OLD = [
    ({"window": 16}, Needs(LastQueries(16))),
    ({"window": 0}, Needs()),
    ({"column_sums": True, "column_squares": True}, Needs(ColumnSums(), ColumnSquares())),
    ({"token_ids": True, "unrotated": False}, Needs(TokenIds())),
    ({"unrotated": True, "output_norms": "l1"}, Needs(KeysBeforeRope(), OutputNorms("l1"))),
    ({"query_moments": QueryMomentsNeed(4)}, Needs(QueryMomentsNeed(4))),
    ({"surprise": SurpriseNeed(0.5)}, Needs(SurpriseNeed(0.5))),
]


@pytest.mark.parametrize(("options", "needs"), OLD, ids=str)
def test_names_of_before_are_taken_with_a_warning(options, needs) -> None:
    with pytest.warns(DeprecationWarning, match="Needs"):
        assert Needs(**options) == needs


def test_a_name_that_never_was_is_refused() -> None:
    with pytest.raises(TypeError, match="takes no windows="):
        Needs(windows=3)
    assert window_of(Needs()) == 0


def test_fields_of_before_are_read_with_a_warning() -> None:
    entries, sums = torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2)
    seen = Observation(entries, entries, torch.zeros(1, 1, 2), observed={ColumnSums: sums})
    with pytest.warns(DeprecationWarning, match=r"observation\[ColumnSums\]"):
        assert seen.column_sums is sums
    with pytest.warns(DeprecationWarning):
        assert seen.token_ids is None
    with pytest.raises(KvfoldError, match="token ids are for methods with Needs"):
        print(seen[TokenIds])
    with pytest.raises(AttributeError, match="no columns"):
        print(seen.columns)
