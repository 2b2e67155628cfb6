# SPDX-License-Identifier: Apache-2.0
"""random: its seed chooses what it keeps."""

from __future__ import annotations

from tests.helpers.caches import (
    positions,
    start,
)


def test_the_seed_chooses_what_random_keeps(model):
    first, second, third = (positions(start(model, "random", seed=s).cache) for s in (0, 0, 1))
    assert first == second != third
