# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from kvfold.methods.base import Forced, Method, Observation, Stages, register
from kvfold.methods.stages.allocate.uniform import uniform, uniform_with_skipped


@register("knorm", paper="arXiv 2406.11430", formula="s[h, t] = −‖k[h, t]‖")
@dataclass(frozen=True)
class KNorm(Method):
    """Keeps the keys of lowest L2 norm, as these receive high attention.

    `skip_layers=0/1` is the authors' setting: those layers stay whole, inside the same total. The
    last `protect_recent` tokens stay. Where one latent serves all heads (DeepSeek), its score is
    the mean over the heads' own keys. A bias of the keys' projection counts in their norms, as in
    kvpress. Raises KvfoldError for a negative `protect_recent`.
    Source: Devoto et al., section 3; alessiodevoto/l2compress.
    """

    by_head: ClassVar[bool] = True
    nested: ClassVar[bool] = True
    protect_recent: int = 0  # newest tokens that stay
    skip_layers: tuple[int, ...] = ()  # layers that stay whole, −1: the last

    def __post_init__(self) -> None:
        self.check_range(0, None, "protect_recent")

    def stages(self) -> Stages:
        skipped, option = self.skip_layers, "knorm:skip_layers"
        allocate = partial(uniform_with_skipped, skipped=skipped, option=option)
        return Stages(
            score=negative_norm,
            allocate=allocate if skipped else uniform,
            forced=Forced(recent=self.protect_recent),
        )


def negative_norm(observation: Observation) -> Tensor:
    """Scores −‖k‖₂ `[B, H, T]`, float32: keys of low norm receive high attention."""
    norms: Tensor = observation.keys.float().norm(dim=-1)
    return -norms
