# SPDX-License-Identifier: Apache-2.0
"""Whether a model's forwards come to their end: one may fail behind the last layer's attention."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class ToldOfForwards(ABC):
    """A cache that is told of the forwards that read into it."""

    @abstractmethod
    def forward_begins(self) -> None:
        """Nothing of it is stored yet; an error raised here is the forward's."""

    @abstractmethod
    def forward_returned(self, ids: Tensor | None) -> None:
        """It came to its end; `ids [B, S]` are what it was given, None where that was no ids."""


# Held while a model's attention or its hooks change, and while it is tried out.
preparing = threading.RLock()
_watched: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def watch(model: nn.Module) -> None:
    """From now on caches are told when a forward of `model` begins, and when it has returned."""
    if model not in _watched:
        _watched[model] = [
            model.register_forward_pre_hook(_begins, with_kwargs=True),
            model.register_forward_hook(_returned, with_kwargs=True),
        ]


def unwatch(model: nn.Module) -> None:
    """Takes that back."""
    for handle in _watched.pop(model, []):
        handle.remove()


def _begins(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, ToldOfForwards):
        cache.forward_begins()


def _returned(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, ToldOfForwards):
        cache.forward_returned(kwargs.get("input_ids", next(iter(args), None)))
