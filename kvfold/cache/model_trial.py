# SPDX-License-Identifier: Apache-2.0
"""Trial of a model: a few tokens with a cache that evicts, when its first cache is made.

It brings up what the attention function refuses (`attention/function.py`): more or fewer attention
calls than cache updates, keys or values changed on the way, masks made from the stored entries,
cache classes of the model's own.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.cache.layer import CompressedLayer
from kvfold.cache.model_binding import KeysLost
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.hf.models import read_tokens
from kvfold.hf.recurrent import note_restarts
from kvfold.hf.rope_deltas import left_alone
from kvfold.hf.stock_layers import attributes

METHOD, BUDGET = "local_window", 4
FORWARDS = (6, 1, 2)  # tokens: a prompt that is evicted from, a decode step, a later turn
TOKENS = sum(FORWARDS)

_tried: WeakSet[PreTrainedModel] = WeakSet()


class EntryShape(NamedTuple):
    """A layer's KV heads in this process, and the channels of a key and of a value."""

    heads: int
    key: int
    value: int

    @classmethod
    def of(cls, layer: CompressedLayer) -> EntryShape:
        """The shape of what the layer stores."""
        store = layer.state.stored()
        return cls(store.keys.shape[1], store.keys.shape[3], store.values.shape[3])


_shapes: WeakKeyDictionary[PreTrainedModel, list[EntryShape]] = WeakKeyDictionary()
# Attributes of the other layers by their indices, tensors without their data.
_others: WeakKeyDictionary[PreTrainedModel, dict[int, dict[str, Any]]] = WeakKeyDictionary()


def untried(model: PreTrainedModel) -> bool:
    """True, once, if the model has weights and no cache was made for it yet."""
    if model in _tried or model.device.type == "meta":
        return False
    _tried.add(model)
    return True


def entry_shapes(model: PreTrainedModel) -> list[EntryShape] | None:
    """Shapes of the compressed layers, as the trial found them; None if there was none."""
    return _shapes.get(model)


def other_layers(model: PreTrainedModel) -> dict[int, dict[str, Any]]:
    """Attributes of layers that are not compressed, by index, after `TOKENS`; {} without a trial.

    Tensors are on the device meta.
    """
    return _others.get(model, {})


def run(model: PreTrainedModel, cache: Cache) -> None:
    """Runs the trial; raises UnsupportedModel, and stays due, if the model fails it."""
    try:
        _read(model, cache)
    except BaseException:
        _tried.discard(model)
        raise


def _read(model: PreTrainedModel, cache: Cache) -> None:
    name = type(model).__name__
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        # Dropout of a model that is being trained draws numbers that are the user's.
        with torch.random.fork_rng(devices), left_alone(model):
            for tokens in FORWARDS:
                ids = torch.ones((1, tokens), dtype=torch.long, device=model.device)
                read_tokens(model, ids, cache, None)
            note_restarts(model)
    except KeysLost as problem:
        raise UnsupportedModel(
            f"{name} attends to its cache without transformers' attention interface, so kvfold "
            "cannot observe its attention"
        ) from problem
    except (KvfoldError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        without = _problem_without_cache(model)
        if without is not None:
            raise UnsupportedModel(f"{name} cannot read text alone: {without}") from problem
        raise UnsupportedModel(
            f"{name} reads text, but not with a cache of kvfold's: {problem}"
        ) from problem
    layers = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
    seen = {layer.get_seq_length() for layer in layers}
    if seen != {TOKENS}:
        raise UnsupportedModel(
            f"{name} does not write every token to every layer of its cache: nothing to compress"
        )
    _shapes[model] = [EntryShape.of(layer) for layer in layers]
    _others[model] = {
        index: {name: _without_data(value) for name, value in attributes(layer).items()}
        for index, layer in enumerate(cache.layers)
        if not isinstance(layer, CompressedLayer)
    }


def _without_data(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _problem_without_cache(model: PreTrainedModel) -> Exception | None:
    """The error of a forward of text alone, without any cache; None if there is none."""
    ids = torch.ones((1, FORWARDS[0]), dtype=torch.long, device=model.device)
    try:
        with torch.no_grad(), left_alone(model):
            model(input_ids=ids, use_cache=False)
    except Exception as problem:
        return problem
    return None
