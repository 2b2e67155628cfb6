# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from kvfold.methods.base import Hold, Method, Stages, register, uniform
from kvfold.methods.stages.score.position import recency


@register("local_window", paper="", formula="kept = n − b … n − 1")
@dataclass(frozen=True)
class LocalWindow(Method):
    """Keeps the most recent tokens, when a prefill ends and while decoding."""

    by_head: ClassVar[bool] = True
    nested: ClassVar[bool] = True

    def stages(self) -> Stages:
        return Stages(score=recency, allocate=uniform, when=Hold())
