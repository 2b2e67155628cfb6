# SPDX-License-Identifier: Apache-2.0
"""PEFT's models and adapters: a cache filled under other adapters cannot be continued."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvfold.errors import UnsupportedModel
from kvfold.hf.header import ADAPTERS
from kvfold.hf.models import full_weight
from kvfold.kernels.full_precision import full_precision

# Names of the module that one of PEFT's layers wraps.
WRAPPED = ("base_layer", "original_module")
# Arguments that PEFT hands to its layers in one forward, and why a cache cannot follow them.
OF_A_FORWARD = {
    "adapter_names": "adapter_names= gives rows adapters of their own, which a cache does not tell "
    "apart: switch one on with set_adapter, and read its rows into a cache of their own",
    "alora_offsets": "an activated LoRA (aLoRA) begins at tokens that it looks for in each "
    "forward, and not in those that a cache has read: use another kind of adapter",
}
COLUMNS = 1024  # numbers of 8 bytes in a row, where tensors are summed up


@dataclass(frozen=True)
class Adapters:
    """Adapters in effect: their names, scales and other settings, and sums of their tensors."""

    names: tuple[str, ...] = ()
    settings: tuple[Any, ...] = ()
    sums: bytes = b""

    def __str__(self) -> str:
        return f"under the adapter {', '.join(self.names)}" if self.names else "without an adapter"

    def spelled(self) -> str:
        """The adapters as they follow the checksum of all weights in a file; "" for none."""
        if not self.names:
            return ""
        made = hashlib.blake2b(repr(self.settings).encode() + self.sums, digest_size=16)
        return "".join(f"+{name}" for name in self.names) + f"{ADAPTERS}{made.hexdigest()}"


class ModelParts(NamedTuple):
    """Modules of a model without those of adapters, and PEFT's layers around them by path."""

    own: list[nn.Module]
    layers: list[tuple[str, nn.Module]]


def parts_of(model: nn.Module) -> ModelParts:
    """The parts of a model; a plain loop, as `named_modules` takes ten times as long."""
    found = ModelParts([], [])
    left: list[tuple[str, nn.Module]] = [("", model)]
    while left:
        path, module = left.pop()
        children = module._modules.items()
        if _is_layer(module):
            found.layers.append((path, module))
            left += [
                (f"{path}.{name}", each)
                for name, each in children
                if each is not None and (name in WRAPPED or _is_layer(each))
            ]
        else:
            left += [(f"{path}.{name}", each) for name, each in children if each is not None]
        found.own.append(module)
    return found


def adapters_of(layers: Iterable[tuple[str, nn.Module]]) -> Adapters:
    """The adapters in effect in PEFT's layers."""
    names, settings, tensors = dict[str, None](), list[Any](), list[Tensor]()
    for path, layer in layers:
        for name in in_effect(layer):
            for attribute, value in _held(layer, name):
                names[name] = None
                before = len(tensors)
                setting = _setting(value, tensors)
                shapes = [(each.dtype, each.shape) for each in tensors[before:]]
                settings.append((path, name, attribute, shapes or setting))
    return Adapters(tuple(names), tuple(settings), _sums(tensors)) if names else Adapters()


def active_adapters(model: nn.Module) -> tuple[str, ...]:
    """Names of the adapters that are in effect, switched on or merged; none without PEFT.

    All of PEFT's layers in a model have the same ones, so the first tells.
    """
    return next((in_effect(module) for module in model.modules() if _is_layer(module)), ())


def in_effect(layer: Any) -> tuple[str, ...]:
    """Names of the adapters that are in effect in one of PEFT's layers.

    Merged ones are in effect whichever others are switched on. Raises UnsupportedModel as
    `OF_A_FORWARD`.
    """
    for hook in layer._forward_pre_hooks.values():
        for argument in getattr(hook, "keywords", ()):
            if argument in OF_A_FORWARD:
                raise UnsupportedModel(OF_A_FORWARD[argument])
    names: Any = getattr(layer, "merged_adapters", ()) or layer.active_adapters
    return () if layer.disable_adapters else tuple(names)


class Scales:
    """Scales of PEFT's layers, by which a decode step notices that they have changed."""

    def __init__(self, layers: Iterable[tuple[str, nn.Module]]) -> None:
        self._then = [
            (weakref.ref(layer), dict(vars(layer)["scaling"]))
            for _, layer in layers
            if "scaling" in vars(layer)
        ]

    @property
    def any(self) -> bool:
        """True if there are scales to watch."""
        return bool(self._then)

    def changed(self) -> bool:
        """True if a scale is another than it was when this was made."""
        for layer, then in self._then:
            now = layer()
            if now is None or vars(now)["scaling"] != then:
                return True
        return False


def _is_layer(module: nn.Module) -> bool:
    """True for one of PEFT's layers; of a model itself `disable_adapters` is a method."""
    return isinstance(getattr(type(module), "disable_adapters", None), property)


def _held(layer: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
    """Parts of an adapter that one of PEFT's layers holds, by attribute."""
    for attribute, held in vars(layer).items():
        if held.__class__ is dict and name in held and attribute[0] != "_":
            yield attribute, held[name]
    for attribute, child in layer._modules.items():
        if child is not None and attribute not in WRAPPED:
            for own in (child._modules, child._parameters, child._buffers):
                if name in own:
                    yield attribute, own[name]


def _setting(value: Any, found: list[Tensor]) -> Any:
    """A plain value as it is now; for another its class, and its tensors among those `found`."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        return repr(value)
    if isinstance(value, nn.Module):
        for own in (value._parameters, value._buffers):
            found += [each for each in own.values() if each is not None and not each.is_meta]
        for module in value._modules.values():
            _setting(module, found)
    elif isinstance(value, Tensor) and not value.is_meta:
        found.append(value)
    return type(value).__name__


@full_precision
@torch.no_grad()
def _sums(tensors: Iterable[Tensor]) -> bytes:
    """Sums over rows and over columns of all bytes: every single change, and every swap, shows.

    A hash function would take several times as long, and a copy from a GPU.
    """
    by_dtype = dict[torch.dtype, list[Tensor]]()
    for tensor in tensors:
        plain = type(tensor) in (Tensor, nn.Parameter)
        flat = (tensor if plain else full_weight(tensor)).flatten()
        flat = flat.view(torch.uint8) if flat.element_size() == 1 else flat
        by_dtype.setdefault(flat.dtype, []).append(flat)
    found = list[Tensor]()
    for flats in by_dtype.values():
        joined = torch.cat([each.to(flats[0].device) for each in flats]).view(torch.uint8)
        whole = len(joined) - len(joined) % (8 * COLUMNS)
        numbers = joined[:whole].view(torch.int64).view(-1, COLUMNS)
        found += [numbers.sum(0).view(torch.uint8), numbers.sum(1).view(torch.uint8)]
        found.append(joined[whole:])
    return b"".join(each.cpu().numpy().tobytes() for each in found)


def learns_prompts(model: Any) -> bool:
    """True if PEFT puts learned tokens or entries before each prompt of the model."""
    config = getattr(model, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))


def unwrapped(model: Any) -> nn.Module:
    """The model that PEFT wraps, or the model itself."""
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner
