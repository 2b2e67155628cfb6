# SPDX-License-Identifier: Apache-2.0
"""Allocation without a budget: the fewest entries that keep a layer's output within a tolerance."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.methods.stages.score.output_error import change_alone, relative_change
from kvfold.methods.stages.select.forced import Forced


def fewest_within(
    observation: Observation, tolerance: float, window: int, kernel: int, sinks: int
) -> Tensor:
    """Sizes `[B, H]` of a layer, forced entries included.

    Entries of all heads are ranked together by `change_alone`. Bisection evicts as many of the
    lowest as keep the relative change of the last `window` queries' output within `tolerance`.
    """
    positions = observation.positions
    none = torch.zeros(len(positions), dtype=torch.long, device=positions.device)
    forced = Forced(sinks=sinks, recent=window).mask(positions, none)
    scores = change_alone(observation, window, kernel).masked_fill(forced, torch.inf)
    scores = scores.masked_fill(positions < 0, -torch.inf)
    order = scores.flatten(1).argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1).view_as(positions)
    enough = (positions >= 0).flatten(1).sum(-1)
    too_few = forced.flatten(1).sum(-1) - 1
    newest = slice(-window, None)
    while bool((enough - too_few > 1).any()):
        middle = (enough + too_few) // 2
        kept = rank < middle.view(-1, 1, 1)
        within = relative_change(observation, kept, newest) <= tolerance
        enough = torch.where(within, middle, enough)
        too_few = torch.where(within, too_few, middle)
    return (rank < enough.view(-1, 1, 1)).sum(-1)
