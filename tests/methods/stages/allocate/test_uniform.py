# SPDX-License-Identifier: Apache-2.0
"""Uniform allocation: exact sums, and layers that stay whole inside the total."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold import BudgetError, KvfoldError
from kvfold.methods.stages.allocate.uniform import uniform, uniform_with_skipped

LAYERS = st.integers(1, 80)


@given(st.integers(0, 10**7), LAYERS)
@settings(max_examples=50, deadline=None)
def test_uniform_is_exact_and_differs_by_one_at_most(total, layers):
    counts = uniform(total, 1234, layers)
    extra = total % layers
    assert counts == [total // layers + 1] * extra + [total // layers] * (layers - extra)


def test_skipped_layers_stay_whole_inside_the_total():
    assert uniform_with_skipped(260, 100, 5, skipped=(0, 1)) == [100, 100, 20, 20, 20]
    assert uniform_with_skipped(262, 100, 5, skipped=(4, 0)) == [100, 21, 21, 20, 100]
    assert uniform_with_skipped(262, 100, 5, skipped=(-1, 0)) == [100, 21, 21, 20, 100]
    assert uniform_with_skipped(260, 100, 5, skipped=(0, 1, -5)) == [100, 100, 20, 20, 20]


@pytest.mark.parametrize(("total", "skipped"), [(199, (0, 1)), (10_000, (0, 1, 2))])
def test_skipped_layers_that_take_everything_are_refused(total, skipped):
    with pytest.raises(BudgetError, match="raise it or skip fewer layers"):
        uniform_with_skipped(total, 100, 3, skipped)


def test_a_skipped_layer_that_there_is_not_is_refused():
    with pytest.raises(KvfoldError, match="knorm:skip_layers names layer 3 of 3"):
        uniform_with_skipped(100, 100, 3, (0, 3), option="knorm:skip_layers")
