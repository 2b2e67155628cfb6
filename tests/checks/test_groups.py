# SPDX-License-Identifier: Apache-2.0
"""Bounds of groups: each has its part of the error, and too few prompts are said with a number."""

from __future__ import annotations

import numpy as np
import pytest

from kvfold.checks.groups import bounded_groups, confidence, too_few, too_high
from kvfold.evidence.bounds import upper_bound


def losses(*groups: str | None, count: int = 100) -> list[tuple[str | None, tuple[str, float]]]:
    return [(name, (f"{n:03}", float(n % 20 == 0))) for name in groups for n in range(count)]


def test_groups_share_the_error_and_order_by_digest() -> None:
    found = bounded_groups(reversed(losses("a", "b")), 0.1)
    ordered = np.array([float(n % 20 == 0) for n in range(100)])
    assert list(found) == ["a", "b"]
    assert found["a"].bound == pytest.approx(float(upper_bound(ordered, 0.05)), rel=1e-12)
    assert (found["a"].prompts, found["a"].loss) == (100, 0.05)


def test_losses_count_up_to_the_most() -> None:
    (found,) = bounded_groups([(None, ("a", 9.0)), (None, ("b", 1.0))], 0.1, most=2.0).values()
    assert found.loss == 1.5 and found.bound <= 2


def test_reasons_name_the_group_and_the_least_number() -> None:
    assert too_high(bounded_groups(losses(None), 0.1), 0.5, 0.1, "the loss") == ""
    said = too_high(bounded_groups(losses("a", "b"), 0.1), 0.06, 0.1, "the loss")
    assert said.startswith("the loss of the group 'a' may be 0.") and said.endswith("above 0.06")
    few = too_high(bounded_groups(losses(None, count=10), 0.1), 0.05, 0.1, "the loss")
    assert few == "10 prompts are too few: give at least 48" == too_few(10, 0.05, 0.1, None)
    assert too_few(48, 0.05, 0.1, None) == ""
    assert "no number of prompts" in too_few(48, 0.0, 0.1, None)


def test_no_confidence_is_rounded_to_certainty() -> None:
    assert [confidence(error) for error in (0.1, 1e-5, 1e-9)] == ["0.9", "0.99999", "0.999999999"]
