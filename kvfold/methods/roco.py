# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvfold.methods.base import Method, Needs, Observation, Stages, register, uniform, when_of
from kvfold.methods.stages.select.top import highest
from kvfold.observers.column_sums import ColumnSquares, ColumnSums


@register(
    "roco",
    paper="arXiv 2402.06262",
    formula="""
        mean[h, t] = Σ_i a[h, i, t] / N[t],  N[t]: queries that could see t
        var[h, t] = Σ_i a[h, i, t]² / N[t] − mean[h, t]²
        evicted = the lowest mean, without the ⌊protect_std_ratio·b⌋ + 1 of highest var
    """,
)
@dataclass(frozen=True)
class RoCo(Method):
    """Evicts the token of lowest mean attention among those whose attention is stable.

    1. Each entry's attention is averaged over the queries that could see it. A low standard
       deviation means stable.
    2. Of a size of k, `int(protect_std_ratio·k) + 1` entries of highest deviation are protected,
       the last `protect_recent` tokens before all others.
    3. Of the rest those of lowest mean are evicted: one for each generated token, and all that
       exceed the size when the prompt ends (`decode="append"`: only then).

    The released code either never evicts from the prompt while decoding, or prunes it piece by
    piece during the prefill; here the whole prompt is read, and compressed once. Variances are
    clamped at 0. Raises KvfoldError for options out of range.
    Source: Ren and Zhu, section 3; DRSY/EasyKV `easykv/easykv.py`.
    """

    by_head: ClassVar[bool] = True
    protect_recent: int = 10  # newest tokens that are protected first
    protect_std_ratio: float = 0.3  # share of the size that is protected
    decode: Literal["hold", "append"] = "hold"  # holds its size while decoding, or adds to it

    def __post_init__(self) -> None:
        self.check_range(0, None, "protect_recent")
        self.check_range(0, 1, "protect_std_ratio")

    def stages(self) -> Stages:
        return Stages(
            needs=Needs(ColumnSums(), ColumnSquares()),
            score=partial(
                low_mean_unless_unstable,
                protect_recent=self.protect_recent,
                protect_std_ratio=self.protect_std_ratio,
            ),
            allocate=uniform,
            when=when_of(self.decode),
        )


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
