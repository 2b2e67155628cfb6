# SPDX-License-Identifier: Apache-2.0
"""`Method`: a frozen dataclass of options that names its stages."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from kvfold.errors import KvfoldError
from kvfold.methods.option_values import as_text
from kvfold.methods.stages.base import Stages


@dataclass(frozen=True)
class Method:
    """Base of all methods: a frozen dataclass of the paper's hyper-parameters, without state."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    formula: ClassVar[str] = ""
    takes_budget: ClassVar[bool] = True
    # True if no stage mixes KV heads; tensor parallelism is exact only then
    by_head: ClassVar[bool] = False
    nested: ClassVar[bool] = False  # a smaller budget keeps a part of what a larger one keeps

    def stages(self) -> Stages:
        """The stages of this method; raises KvfoldError if a subclass does not define them."""
        raise KvfoldError(f"{type(self).__name__} names no stages")

    def brings(self) -> Stages:
        """The stages that it adds to other methods in a composition."""
        return self.stages()

    def brings_sizes(self) -> Stages | None:
        """The stages that it adds to a method that scores; None: as `brings`."""
        return None

    def check_range(self, least: float, most: float | None, *options: str) -> None:
        """Raises KvfoldError, naming the option, unless each is from `least` to `most`.

        `most` None: no limit.
        """
        for option in options:
            value = getattr(self, option)
            if not least <= value <= (math.inf if most is None else most):
                wanted = f"{least} or more" if most is None else f"from {least} to {most}"
                raise KvfoldError(f"{called(self)}:{option} is {wanted}, not {value!r}")

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        changed = [
            f"{f.name}={as_text(values[f.name])}"
            for f in dataclasses.fields(self)
            if values[f.name] != f.default
        ]
        return called(self) + (":" + ",".join(changed) if changed else "")


def called(method: Method) -> str:
    """Registered name of the method; the class's name if it is not registered itself."""
    return str(vars(type(method)).get("name") or type(method).__name__)
