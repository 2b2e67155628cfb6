# SPDX-License-Identifier: Apache-2.0
"""Sizes by a threshold."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kvfold.methods.stages.select.forced import Forced
from kvfold.methods.zap_threshold import above


def test_golden_scores():
    forced = Forced(recent=2)
    scores = [-5.0, -3.0, -6.0, -1.0, -4.5, 0.0, 0.0]

    def left(count: int) -> int:
        seen = SimpleNamespace(
            positions=torch.arange(count)[None, None],
            learned_scores=lambda: torch.tensor(scores[:count])[None, None],
        )
        return int(above(seen, threshold=-4.0, forced=forced))

    # 0 and 2 go; with one token more 3 is judged, and stays; with one more 4 goes.
    assert [left(5), left(6), left(7)] == [3, 4, 4]
