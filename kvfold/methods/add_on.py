# SPDX-License-Identifier: Apache-2.0
"""Base of methods that change what another one does, and evict nothing alone."""

from dataclasses import dataclass
from typing import ClassVar

from kvfold.errors import IllegalComposition
from kvfold.methods.base import Method, Stages


@dataclass(frozen=True)
class AddOn(Method):
    """A method for compositions only; a subclass names one to go with, and what it `brings`."""

    takes_budget: ClassVar[bool] = False
    beside: ClassVar[str]  # a method that it goes with

    def stages(self) -> Stages:
        raise IllegalComposition(
            f"{self} evicts nothing itself: compose it with a method that does, for example "
            f'"{self.beside} + {self}"'
        )
