# SPDX-License-Identifier: Apache-2.0
"""Score by mean attention, with entries of unstable attention protected (RoCo)."""

import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.methods.stages.select.top import highest
from kvfold.observers.column_sums import ColumnSquares, ColumnSums


def low_mean_unless_unstable(
    observation: Observation, *, protect_recent: int = 10, protect_std_ratio: float = 0.3
) -> Tensor:
    """Mean attention `[B, H, T]`, float32, over the queries that could see an entry.

    Protected entries score above 1: of a budget of k, the `int(protect_std_ratio·k) + 1` whose
    attention deviates most, the last `protect_recent` before all others and the newest of these
    first. With k + 1 entries stored, the lowest score is the entry that RoCo evicts: the lowest
    mean among the k − int(protect_std_ratio·k) smallest deviations.

    Source: Ren and Zhu, section 3 (arXiv 2402.06262); DRSY/EasyKV `easykv/easykv.py`.
    """
    assert observation.tokens_seen is not None and observation.budget is not None
    stored = observation.positions >= 0
    queries = torch.where(stored, observation.tokens_seen.view(-1, 1, 1) - observation.positions, 1)
    mean = observation[ColumnSums] / queries
    # Rounding may make the variance of constant attention negative.
    deviation = (observation[ColumnSquares] / queries - mean.square()).clamp(min=0).sqrt()
    age = stored.flip(-1).cumsum(-1).flip(-1)
    # No deviation of attention exceeds 1/2.
    deviation = torch.where(age <= protect_recent, 1.0 + protect_recent - age, deviation)
    budget = observation.budget
    most = torch.minimum((budget.double() * protect_std_ratio).long() + 1, budget)
    protected = highest(deviation.masked_fill(~stored, -1.0), most)
    return torch.where(protected, 2.0 + deviation, mean)
