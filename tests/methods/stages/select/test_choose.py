# SPDX-License-Identifier: Apache-2.0
"""Entries beside the budget stay, and are no matter of the select stage."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvfold.methods.base import Stages
from kvfold.methods.observation import Observation
from kvfold.methods.stages.select.blocks import best_of_blocks
from kvfold.methods.stages.select.choose import choose
from kvfold.methods.stages.select.forced import Forced
from kvfold.methods.stages.select.top import top, with_forced


def test_a_select_stage_sees_what_counts_in_the_budget() -> None:
    seen: list[torch.Tensor] = []

    def best(observation, scores, forced, positions, counts):
        seen.extend((forced, positions, counts))
        return top(with_forced(scores, forced, positions), counts)

    scores = torch.tensor([[[9.0, 8, 1, 5, 2, 4, 3]]])
    stages = Stages(score=lambda _: scores, forced=Forced(recent=1), select=best)
    positions, nothing = torch.arange(7).expand(1, 1, 7), torch.zeros(1, 1, 7, dtype=torch.bool)
    beside = positions < 3
    observation = Observation(scores[..., None], scores[..., None], positions)
    found = choose(stages, observation, positions, nothing, torch.tensor([2]), beside=beside)
    assert found.slots.tolist() == [[[0, 1, 2, 3, 6]]]
    forced, counted, counts = seen
    assert forced.tolist() == [[[False] * 6 + [True]]] and counts.tolist() == [[2]]
    assert counted.tolist() == [[[-1, -1, -1, 3, 4, 5, 6]]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_16_bits_are_ranked_in_32(dtype: torch.dtype) -> None:
    def score(_: Observation) -> torch.Tensor:
        return torch.linspace(0, 1, 1024, dtype=dtype).expand(1, 1, 1024)

    select = partial(best_of_blocks, first=0, block=16)
    stages = Stages(score=score, forced=Forced(recent=20), select=select)
    positions = torch.arange(1024).expand(1, 1, 1024)
    keys = torch.zeros(1, 1, 1024, 1)
    nothing = torch.zeros(1, 1, 1024, dtype=torch.bool)
    found = choose(
        stages, Observation(keys, keys, positions), positions, nothing, torch.tensor([100])
    )
    assert {*range(1004, 1024)} <= {*found.slots[0, 0].tolist()}
