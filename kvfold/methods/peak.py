# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvfold.methods.base import Method, Stages, register
from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.uniform import uniform
from kvfold.observers.base import Needs
from kvfold.observers.peak_logits import PeakLogits


@register("peak", paper="", formula="s[h, t] = max over queries i of q[i] · k[h, t] / √D")
@dataclass(frozen=True)
class Peak(Method):
    """Keeps the entries that any query of the prompt points at most, whatever else it sees.

    A trial of a new observation.
    """

    by_head: ClassVar[bool] = True

    def stages(self) -> Stages:
        return Stages(needs=Needs(PeakLogits()), score=highest_logit, allocate=uniform)


def highest_logit(observation: Observation) -> Tensor:
    """The highest logit of each entry `[B, H, T]`, float32."""
    return observation[PeakLogits]
