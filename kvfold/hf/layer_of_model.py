# SPDX-License-Identifier: Apache-2.0
"""A reference to one layer of a model, which caches may hold."""

from __future__ import annotations

import weakref
from typing import Any, Self

from torch import nn
from transformers import PreTrainedModel

from kvfold.errors import UnsupportedModel
from kvfold.hf.models import attention_module


class LayerOfModel:
    """Layer `layer` of a model that is not kept alive; copies share it, and files leave it out."""

    def __init__(self, model: PreTrainedModel, layer: int) -> None:
        self._reference: weakref.ref[PreTrainedModel] | None = weakref.ref(model)
        self.layer = layer

    def __getstate__(self) -> dict[str, Any]:
        return {"_reference": None, "layer": self.layer}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def model(self) -> PreTrainedModel:
        """The model; raises UnsupportedModel if it is gone."""
        model = None if self._reference is None else self._reference()
        if model is None:
            raise UnsupportedModel("the model of this cache is gone")
        return model

    @property
    def attention(self) -> nn.Module | None:
        """The layer's attention module; None if the model file names none."""
        return attention_module(self.model, self.layer)
