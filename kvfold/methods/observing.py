# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass, field
from typing import ClassVar

from kvfold.methods.base import Method, Needs, Stages


@dataclass(frozen=True)
class Observing(Method):
    """Keeps every entry and makes the observations that others need: it reads a text for them."""

    takes_budget: ClassVar[bool] = False

    needs: Needs = field(default_factory=Needs)

    def stages(self) -> Stages:
        return Stages(needs=self.needs)
