# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from typing import ClassVar

from kvfold.methods.base import Method, Stages, register


@register("full", paper="", formula="kept = 0 … n − 1")
@dataclass(frozen=True)
class Full(Method):
    """Keeps every entry: the full cache, to which all other methods are compared."""

    takes_budget: ClassVar[bool] = False
    by_head: ClassVar[bool] = True

    def stages(self) -> Stages:
        return Stages()
