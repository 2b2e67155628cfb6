# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from kvfold.methods.base import Method, Stages, register, uniform
from kvfold.methods.stages.score.position import uniform_noise


@register("random", paper="", formula="s[h, t] ~ uniform(0, 1)")
@dataclass(frozen=True)
class Random(Method):
    """Keeps a random set per KV head: the floor that a method must beat."""

    nested: ClassVar[bool] = True

    def stages(self) -> Stages:
        return Stages(score=uniform_noise, allocate=uniform)
