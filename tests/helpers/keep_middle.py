# SPDX-License-Identifier: Apache-2.0
"""A method that is wrong by design: it keeps the middle of the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import kvfold


def nearness_to_the_middle(seen: kvfold.Observation) -> Tensor:
    positions = seen.positions.float()
    return -(positions - positions.amax(-1, keepdim=True) / 2).abs()


@kvfold.register("keep_middle")
@dataclass(frozen=True)
class KeepMiddle(kvfold.Method):
    """Keeps the middle of the prompt."""

    takes_budget: ClassVar[bool] = True

    def stages(self) -> kvfold.Stages:
        return kvfold.Stages(score=nearness_to_the_middle)
