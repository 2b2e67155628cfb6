# SPDX-License-Identifier: Apache-2.0
"""CaM: how the value that leaves is spread, by hand."""

from __future__ import annotations

import pytest

from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    SHAPES,
    assert_steps,
    cam_step,
)


@SHAPES
@pytest.mark.parametrize("targets", [32, 3])
def test_cam_spreads_the_value_that_leaves(targets, heads, lengths):
    spec = f"cam:deterministic=true,targets={targets}"
    assert_steps(spec, SMALL, heads, lengths, lambda one: cam_step(one, SMALL, targets))
