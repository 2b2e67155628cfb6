# SPDX-License-Identifier: Apache-2.0
"""transformers' own cache layers: those that kvfold replaces, and cropping of the others."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from kvfold.errors import UnsupportedModel
from kvfold.hf.models import text_config, trained_length

# Layers that stay transformers' own; the last of these classes came after 5.15.
LEFT_ALONE = tuple(
    getattr(cache_utils, name)
    for name in ("DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer")
    if hasattr(cache_utils, name)
)


def stock_layers(model: PreTrainedModel) -> list[Any]:
    """The layers of transformers' own cache, full ones where a window never slides.

    Raises UnsupportedModel for a kind that kvfold cannot use, and where none is full.
    """
    wide = never_sliding_windows(model)
    layers = _own_layers(model)
    layers = [DynamicLayer() if i in wide else layer for i, layer in enumerate(layers)]
    for index, layer in enumerate(layers):
        mixed = isinstance(layer, LinearAttentionLayer) and isinstance(layer, DynamicLayer)
        if mixed or not (type(layer) is DynamicLayer or isinstance(layer, LEFT_ALONE)):
            raise UnsupportedModel(
                f"layer {index} of {type(model).__name__} caches in a {type(layer).__name__}, "
                "which kvfold does not know"
            )
    if not any(is_compressible(layer) for layer in layers):
        raise UnsupportedModel(_nothing_to_compress(type(model).__name__, layers))
    return layers


def never_sliding_windows(model: PreTrainedModel) -> dict[int, int]:
    """Windows by layer that cover the longest text the model was trained for (Phi-3-mini-128k)."""
    length = trained_length(model)
    return {
        i: layer.sliding_window
        for i, layer in enumerate(_own_layers(model))
        if type(layer) is DynamicSlidingWindowLayer and length and layer.sliding_window >= length
    }


def _own_layers(model: PreTrainedModel) -> list[Any]:
    try:
        return DynamicCache(config=text_config(model)).layers
    except Exception as problem:
        raise UnsupportedModel(
            f"transformers makes no cache for {type(model).__name__}: {problem}"
        ) from problem


def _nothing_to_compress(name: str, layers: list[Any]) -> str:
    if not all(hasattr(layer, "sliding_window") for layer in layers):
        return f"no layer of {name} attends to its whole past: nothing to compress"
    window = max(layer.sliding_window for layer in layers)
    return (
        f"all layers of {name} slide, and hold {window} tokens at most: nothing to compress; use "
        "the model without kvfold"
    )


def is_compressible(layer: Any) -> bool:
    """True if a stock layer holds the keys of all tokens."""
    return type(layer) is DynamicLayer


def is_recurrent(layer: Any) -> bool:
    """True if a stock layer holds a recurrent state, which no crop undoes."""
    return isinstance(layer, LinearAttentionLayer)


def has_recurrent(layers: Iterable[Any]) -> bool:
    """True if any of the layers holds a recurrent state."""
    return any(map(is_recurrent, layers))


def layer_lengths(layers: Iterable[Any]) -> set[int]:
    """Set of the numbers of tokens that layers with keys hold."""
    return {layer.get_seq_length() for layer in layers if _has_keys(type(layer))}  # type: ignore[arg-type]


@functools.cache
def _has_keys(kind: type) -> bool:
    """True if layers of this class hold keys; cached, as every layer of every forward asks."""
    return issubclass(kind, CacheLayerMixin)


def _holds_entries(layer: Any) -> bool:
    """False for layers that share another's entries (Gemma 3n), and for recurrent ones."""
    return isinstance(layer, CacheLayerMixin)


def can_crop_stock(layer: Any, tokens_to_remove: int) -> bool:
    """True if a stock layer can drop its last `-tokens_to_remove` tokens."""
    if tokens_to_remove == 0:
        return True
    if is_recurrent(layer):
        return False
    if not _holds_entries(layer):
        return True
    window, seen = getattr(layer, "sliding_window", None), layer.get_seq_length()
    if window is None or seen < window:
        return True
    needed = min(window - 1, seen + tokens_to_remove)
    return bool(layer.record_past) and layer.keys.shape[-2] + tokens_to_remove >= needed


def crop_stock(layer: Any, tokens_to_remove: int) -> None:
    """Crops a stock layer that can be cropped; assisted decoding also crops 0 tokens."""
    if not _holds_entries(layer):
        return
    if tokens_to_remove or getattr(layer, "record_past", False):
        layer.crop(tokens_to_remove)


def detach_layers(layers: Iterable[Any]) -> None:
    """Lets go of the graph of a forward with gradients: torch copies no tensor inside a graph."""
    for layer in layers:
        for name, value in vars(layer).items():
            setattr(layer, name, _detached(value))


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if type(value) is dict:
        return {key: _detached(each) for key, each in value.items()}
    return [_detached(each) for each in value] if type(value) is list else value


def attributes(layer: Any) -> dict[str, Any]:
    """A layer's attributes by name, dicts flattened to names `attribute/key`."""
    flat: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            flat |= {f"{name}/{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def cut_windows(layers: Iterable[Any]) -> None:
    """Lets go of a prompt's entries before the windows, which are views of its whole tensors."""
    for layer in layers:
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.is_initialized:
            for name in ("keys", "values"):
                window = getattr(layer, name)
                if window.untyped_storage().nbytes() > window.nbytes:
                    setattr(layer, name, window.clone())


def bytes_held(layers: Iterable[Any]) -> int:
    """Bytes of all storages of layers, each whole: a window may be a view of a longer buffer."""
    tensors = (x for layer in layers for x in attributes(layer).values() if isinstance(x, Tensor))
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def reset_layers(layers: Iterable[Any]) -> None:
    """Empties all layers; before transformers 5.18 windows would keep zeros in their place."""
    for layer in layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.keys = layer.values = None
            layer.is_initialized = False
        layer.reset()


def take_rows(layers: Iterable[Any], rows: Tensor) -> None:
    """Row i of every layer becomes a copy of row `rows[i]`, of which there may be more or fewer.

    By what all kinds have: recurrent layers can only be reordered, layers without entries not even
    that.
    """
    for layer in layers:
        if hasattr(layer, "reorder_cache"):
            layer.reorder_cache(rows)
