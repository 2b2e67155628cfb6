# SPDX-License-Identifier: Apache-2.0
"""Layers that stay transformers' own (sliding windows, recurrent states), by their attributes.

Their classes change with the version, so that whatever they hold is saved: tensors, numbers, dtypes
and devices, alone or in a dict with whole numbers as keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfold.contexts.files.format import OtherPart
from kvfold.errors import ContextFileError
from kvfold.kernels.views import Named

# Of the shape [B, H, T, D].
BY_HEAD = ("keys", "values")
DTYPE, DEVICE = "dtype ", "device"


def describe(layer: Any, index: int) -> tuple[OtherPart, Named, dict[str, Tensor]]:
    """A layer's numbers, its keys and values by head, and its other tensors."""
    by_head: Named = {}
    whole: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for name, value in _flat(vars(layer)).items():
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
    part = OtherPart(
        index=index,
        kind=type(layer).__name__,
        numbers=numbers,
        by_head=sorted(by_head),
        whole=sorted(whole),
    )
    return part, by_head, whole


def restore(
    layer: Any, part: OtherPart, by_head: Named, whole: dict[str, Tensor], device: torch.device
) -> None:
    """Makes a fresh layer the one that was described.

    Raises ContextFileError for names and dtypes that no such layer has.
    """
    state: dict[str, Any] = {name: torch.stack(heads)[None] for name, heads in by_head.items()}
    state |= {name: tensor.clone() for name, tensor in whole.items()}
    for name, value in part.numbers.items():
        if value == DEVICE:
            value = device
        elif isinstance(value, str):
            value = getattr(torch, value.removeprefix(DTYPE), None)
            if not isinstance(value, torch.dtype):
                raise ContextFileError(f"layer {part.index} has an unknown dtype in {name!r}")
        state[name] = value
    for name, value in state.items():
        attribute, _, key = name.partition("/")
        if not _is_state(layer, attribute, key):
            raise ContextFileError(f"layer {part.index} has no {name!r} to be restored")
        if key:
            getattr(layer, attribute)[int(key)] = value
        else:
            setattr(layer, attribute, value)


def _is_state(layer: Any, attribute: str, key: str) -> bool:
    """Whether a layer may hold data under a name: no method, and a key only of a dict."""
    if key:
        return key.isdigit() and isinstance(vars(layer).get(attribute), dict)
    return not attribute.startswith("__") and not callable(getattr(type(layer), attribute, None))


def _flat(attributes: dict[str, Any]) -> dict[str, Any]:
    """Dicts within become `name/key`."""
    flat: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, dict):
            flat |= {f"{name}/{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat
