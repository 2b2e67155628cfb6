# SPDX-License-Identifier: Apache-2.0
"""The binding of a cache to its model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from kvfold.attention import handshake
from kvfold.errors import UnsupportedModel
from kvfold.hf.attention import is_routed
from kvfold.hf.models import text_config


class ModelBinding:
    """The model of a cache, and the state of its handshake: `waiting` until attention has run."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.modules = frozenset(id(module) for module in model.modules())
        self.name = type(model).__name__
        self.config = text_config(model)
        self.waiting = False

    def refusal(self) -> UnsupportedModel:
        """Error for a module of another model."""
        return UnsupportedModel(f"this cache was made for another model (a {self.name})")

    def asked(self, first: bool, level: bool) -> None:
        """Called before a layer hands out keys; `first`: it is the first layer of a forward.

        Raises UnsupportedModel if another attention took the last keys or would take these, or if
        the layers are not `level`: they hold different numbers of tokens.
        """
        lost = first and self.config is not None and not is_routed(self.config)
        if self.waiting or lost or not level:
            handshake.forget()
            self.check_answered(lost=True)
        self.waiting = True

    def check_answered(self, lost: bool = False) -> None:
        """Raises UnsupportedModel if another attention took a layer's keys, or they are `lost`."""
        if self.waiting or lost:
            raise UnsupportedModel(
                "this cache's keys did not come back to kvfold's attention: the last forward "
                "failed, kvfold.disable(model) was called, or another model used the cache; "
                "make a new cache"
            )

    def answered(self) -> None:
        """Notes that the keys arrived in kvfold's attention."""
        self.waiting = False

    def __getstate__(self) -> dict[str, Any]:
        return {"modules": frozenset(), "name": self.name, "config": None, "waiting": False}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelBinding:
        other = object.__new__(ModelBinding)
        other.__dict__.update(self.__dict__)
        return other
