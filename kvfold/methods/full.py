# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass

from kvfold.method import Method, Stages, register


@register("full", paper="")
@dataclass(frozen=True)
class Full(Method):
    """Keeps everything: the full cache that all others are measured against."""

    takes_budget = False

    def stages(self) -> Stages:
        return Stages()
