# SPDX-License-Identifier: Apache-2.0
"""Base of methods that store entries in another form, and evict none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvfold.methods.base import Method, Stages

if TYPE_CHECKING:
    from kvfold.store.encoding import Encode


@dataclass(frozen=True)
class Encoder(Method):
    """A method whose only stage is an encoding, which a subclass makes of its options."""

    takes_budget: ClassVar[bool] = False
    by_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.encoding()  # it checks the options

    def encoding(self) -> Encode:
        """The encoding; raises KvfoldError for options out of range."""
        raise NotImplementedError

    def stages(self) -> Stages:
        return Stages(encode=self.encoding())
