# SPDX-License-Identifier: Apache-2.0
"""Saving and restoring layers of transformers' own (sliding windows, recurrent states).

Their classes change between versions, so every attribute is saved: tensors, numbers, dtypes and
devices, plain or in a dict with integer keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfold.cache.model_trial import TOKENS
from kvfold.contexts.files.header import StockLayerHeader
from kvfold.errors import ContextFileError
from kvfold.hf.stock_layers import attributes
from kvfold.kernels.views import Named

# Attributes of shape [B, H, T, D], saved per KV head.
BY_HEAD = ("keys", "values")
MOST_SETTING = 2**16  # of a number that a fresh layer does not have yet, as a kernel's size
DTYPE, DEVICE = "dtype ", "device"


def describe(layer: Any, index: int) -> tuple[StockLayerHeader, Named, dict[str, Tensor]]:
    """A layer's numbers, its keys and values per KV head, and its other tensors.

    Raises ContextFileError for an attribute of another type.
    """
    by_head: Named = {}
    whole: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for name, value in attributes(layer).items():
        if isinstance(value, Tensor) and name in BY_HEAD:
            by_head[name] = list(value[0])
        elif isinstance(value, Tensor):
            whole[name] = value
        elif isinstance(value, torch.dtype):
            numbers[name] = f"{DTYPE}{str(value).removeprefix('torch.')}"
        elif isinstance(value, torch.device):
            numbers[name] = DEVICE
        elif value is None or isinstance(value, bool | int | float):
            numbers[name] = value
        else:
            raise ContextFileError(
                f"layer {index} holds {name!r}, a {type(value).__name__}, which cannot be saved"
            )
    kind, heads, rest = type(layer).__name__, sorted(by_head), sorted(whole)
    header = StockLayerHeader(index=index, kind=kind, numbers=numbers, by_head=heads, whole=rest)
    return header, by_head, whole


def restore(
    layer: Any,
    header: StockLayerHeader,
    by_head: Named,
    whole: dict[str, Tensor],
    device: torch.device,
    seen: int,
) -> None:
    """Sets a fresh layer to a saved state of `seen` tokens; tensors are copied.

    Raises ContextFileError for an attribute, number or dtype that the layer cannot have.
    """
    fresh = attributes(layer)
    state: dict[str, Any] = {name: torch.stack(heads)[None] for name, heads in by_head.items()}
    state |= {name: tensor.clone() for name, tensor in whole.items()}
    for name, value in header.numbers.items():
        if value == DEVICE:
            value = device
        elif isinstance(value, str):
            value = getattr(torch, value.removeprefix(DTYPE), None)
            if not isinstance(value, torch.dtype):
                raise ContextFileError(f"layer {header.index} has an unknown dtype in {name!r}")
        elif not _fits(value, fresh.get(name), max(seen, MOST_SETTING)):
            raise ContextFileError(f"layer {header.index} cannot have {value} as {name!r}")
        state[name] = value
    for name, value in state.items():
        attribute, _, key = name.partition("/")
        if not _is_state(layer, attribute, key):
            raise ContextFileError(f"layer {header.index} has no {name!r} to be restored")
        if key:
            getattr(layer, attribute)[int(key)] = value
        else:
            setattr(layer, attribute, value)


def check_restored(
    layer: Any, trial: dict[str, Any], seen: int, dtype: torch.dtype, heads: int | None
) -> None:
    """Raises ValueError for a layer that is not as one of the model's own after `seen` tokens.

    `trial` are the attributes of that layer after the trial's tokens, `dtype` is the model's;
    `heads` are the KV heads of a part that was loaded.
    """
    found = attributes(layer)
    for name, tried in trial.items():
        value = found.get(name)
        if isinstance(tried, Tensor) and isinstance(value, Tensor):
            same = value.dtype in (tried.dtype, dtype)
            same = same and _shape(name, value) == _shape(name, tried, heads)
        elif isinstance(tried, torch.dtype):
            same = value in (tried, dtype)
        elif isinstance(tried, torch.device):
            same = isinstance(value, torch.device)
        else:  # a setting, or the tokens seen
            counted = type(tried) is int and tried == TOKENS and value == seen
            same = type(value) is type(tried) and (value == tried or counted)
        if not same:
            raise ValueError(f"a {type(layer).__name__} cannot have {_told(value)} as {name!r}")
    if isinstance(trial.get("keys"), Tensor):
        columns, held = layer.get_mask_sizes(0)[0], {layer.keys.shape[2], layer.values.shape[2]}
        if held != {columns}:
            raise ValueError(f"a {type(layer).__name__} holds {held} entries, not {columns}")


def _shape(name: str, tensor: Tensor, heads: int | None = None) -> list[int]:
    """The shape of a tensor; of entries `[B, H, T, D]` without their number."""
    shape = list(tensor.shape)
    if name not in BY_HEAD or len(shape) != 4:
        return shape
    return [shape[0], shape[1] if heads is None else heads, shape[3]]


def _told(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]


def _fits(value: Any, fresh: Any, most: int) -> bool:
    """True for a value that may follow a fresh layer's: settings stay, other numbers count."""
    if value is None or isinstance(value, bool) or isinstance(fresh, bool):
        return type(value) is type(fresh)
    whole = isinstance(value, int) or isinstance(fresh, float)
    return whole and 0 <= value <= most and (not fresh or bool(value == fresh))


def _is_state(layer: Any, attribute: str, key: str) -> bool:
    """True if `attribute` may hold data: it is no method, and a dict if there is a `key`."""
    if key:
        return key.isdigit() and isinstance(vars(layer).get(attribute), dict)
    return not attribute.startswith("__") and not callable(getattr(type(layer), attribute, None))
