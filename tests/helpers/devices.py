# SPDX-License-Identifier: Apache-2.0
"""Devices that are not there: tensors on the CPU that claim to be on one, and mix as on GPUs do.

Their type is one of torch's that has no backend here. `Devices()` must be entered before a tensor
is made on one. Tensors of two devices, or of one and the CPU, are refused by every operation but
copies, indexing by indices on the CPU, and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

CPU = torch.device("cpu")
FIRST, SECOND = torch.device("ipu", 0), torch.device("ipu", 1)
aten = torch.ops.aten
INDEXING = {aten.index.Tensor, aten._unsafe_index.Tensor}
WRITING = {aten.index_put.default, aten.index_put_.default}


class MixedDevices(RuntimeError):
    """One operation on tensors of several devices."""


class Placed(Tensor):
    """A tensor `held` on the CPU that claims to be on the device `place`."""

    held: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, held: Tensor, place: torch.device) -> Placed:
        assert type(held) is not Placed
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",
        )
        made.held, made.place = held, place
        return made

    def __init__(self, held: Tensor, place: torch.device) -> None:
        super().__init__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Placed:
        memo[id(self)] = made = Placed(self.held.clone(), self.place)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func == Tensor.device.__get__:
            return args[0].place
        if func == Tensor.is_meta.__get__:
            return False
        if name == "get_device":
            return args[0].place.index
        if name in ("tolist", "data_ptr", "untyped_storage", "__format__"):
            return getattr(args[0].held, name)(*args[1:], **kwargs)
        if name == "new_tensor":
            dtype = kwargs.get("dtype", args[0].dtype)
            return Placed(torch.tensor(args[1], dtype=dtype), args[0].place)
        if name == "numpy":
            raise TypeError("a tensor that is not on the CPU has no numpy array")
        if func is nn.functional.scaled_dot_product_attention:
            home = _one_of([x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)], name)
            out = func(*_held(args), **_held(kwargs))
            return Placed(out.transpose(1, 2).contiguous().transpose(1, 2), home)
        if name == "to":
            device, dtype = _wanted(args[0], args[1:], kwargs)
            copied = kwargs.get("copy", False)
            if (device, dtype) == (args[0].device, args[0].dtype) and not copied:
                return args[0]
            args, kwargs = (args[0], device, dtype), {"copy": copied}
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], _listed_as_tensors(args[1]), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class Devices(TorchDispatchMode):
    """Lets torch make tensors on devices that are not there, while it is entered."""

    def __enter__(self) -> Devices:
        self.made_from_data = _MadeFromData()
        self.made_from_data.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.made_from_data.__exit__(*raised)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _MadeFromData(TorchFunctionMode):
    """Functions that make a tensor of Python's numbers or of a list of tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        place = _place(kwargs.get("device"))
        if func in (torch.tensor, torch.as_tensor) and place is not None and place != CPU:
            del kwargs["device"]
            if isinstance(args[0], Placed):
                return args[0].to(place, kwargs.get("dtype", args[0].dtype))
            made = func(*args, **kwargs)
            return made.to(place) if isinstance(made, Placed) else Placed(made.clone(), place)
        name = getattr(func, "__name__", "")
        if name == "pad_sequence" and any(isinstance(x, Placed) for x in args[0]):
            home = _one_of(args[0], name)
            return Placed(func(_held(args[0]), *args[1:], **kwargs), home)
        return func(*args, **kwargs)


def split(model: PreTrainedModel, places: Sequence[torch.device]) -> PreTrainedModel:
    """Layer i on `places[i]`, and all else as accelerate's map of devices has it.

    Embeddings of tokens are on the first device; norm, head and rotary embedding on the last, and
    what the embedding returns stays there. Logits come back to the first.
    """
    first, last, inner = places[0], places[-1], model.model
    behind = [(inner.rotary_emb, last), (inner.norm, last), (model.lm_head, last)]
    for module, place in (*zip(inner.layers, places, strict=True), *behind):
        _put(module, place)
        module.register_forward_pre_hook(_moving(place), with_kwargs=True, prepend=True)
    _put(model, first)
    inner.embed_tokens.register_forward_pre_hook(_moving(first), with_kwargs=True, prepend=True)

    def brought_back(module: nn.Module, args: Any, out: Any) -> Any:
        for key in list(out.keys()):
            out[key] = _to(out[key], first)
        return out

    model.register_forward_hook(brought_back)
    return model


def _put(module: nn.Module, place: torch.device) -> None:
    """Parameters and buffers that are on the CPU yet."""
    for each in module.modules():
        for name, weight in each._parameters.items():
            if weight is not None and not isinstance(weight, Placed):
                each._parameters[name] = nn.Parameter(Placed(weight.detach(), place), False)
        for name, buffer in each._buffers.items():
            if buffer is not None and not isinstance(buffer, Placed):
                each._buffers[name] = Placed(buffer.detach().clone(), place)


def _moving(place: torch.device) -> Callable[..., Any]:
    return lambda module, args, kwargs: (_to(args, place), _to(kwargs, place))


def _to(tree: Any, place: torch.device) -> Any:
    if isinstance(tree, dict):
        return {key: _to(value, place) for key, value in tree.items()}
    if not isinstance(tree, Tensor | tuple | list):
        return tree  # a cache is one of its own
    return tree_map_only(Tensor, lambda x: x.to(place), tree)


def _held(tree: Any) -> Any:
    return tree_map_only(Placed, lambda x: x.held, tree)


def _place(device: Any) -> torch.device | None:
    if device is None:
        return None
    device = torch.device(device)
    return FIRST if device.type == FIRST.type and device.index is None else device


def _place_of(tensor: Tensor) -> torch.device:
    return tensor.place if isinstance(tensor, Placed) else CPU


def _one_of(tensors: Sequence[Tensor], where: str) -> torch.device:
    found = {_place_of(each) for each in tensors}
    if len(found) > 1:
        raise MixedDevices(f"{where}: {[(str(_place_of(x)), tuple(x.shape)) for x in tensors]}")
    return found.pop()


def _wanted(tensor: Tensor, given: Any, kwargs: Any) -> tuple[torch.device | None, torch.dtype]:
    """Device and dtype that `tensor.to(*given, **kwargs)` asks for."""
    asked = [*given, kwargs.get("device"), kwargs.get("dtype"), kwargs.get("other")]
    device, dtype = tensor.device, tensor.dtype
    for each in asked:
        if isinstance(each, Tensor):
            device, dtype = each.device, each.dtype
        elif isinstance(each, str | torch.device):
            device = _place(each)
        elif isinstance(each, torch.dtype):
            dtype = each
    return device, dtype


def _listed_as_tensors(index: Any) -> Any:
    each = index if isinstance(index, tuple) else (index,)
    found = tuple(torch.tensor(x) if isinstance(x, list) else x for x in each)
    return found if isinstance(index, tuple) else found[0]


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on what the tensors hold; its output is where a GPU's would be."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    placed = [x for x in tensors if isinstance(x, Placed)]
    if func is aten._fused_sdp_choice.default:
        return 0
    if func is aten._local_scalar_dense.default:
        return func(_held(args[0]))
    if func is aten.copy_.default:
        func(_held(args[0]), _held(args[1]), *args[2:])
        return args[0]
    # Torch's own code asks for "meta", which it takes placed tensors to be on.
    wanted = _place(kwargs.get("device"))
    wanted = None if wanted is not None and wanted.type == "meta" else wanted
    if func is aten._to_copy.default or not placed:
        home = wanted or (_place_of(placed[0]) if placed else CPU)
    elif func in INDEXING | WRITING:
        home = _place_of(args[0])
        numbers = [x for x in args[1] if x is not None and _place_of(x) != CPU]
        written = [args[2]] if func in WRITING and args[2].dim() else []
        _one_of([args[0], *numbers, *written], str(func))
    else:
        # Numbers may come from the CPU.
        home = _one_of([x for x in tensors if isinstance(x, Placed) or x.dim()], str(func))
        home = wanted or home
    options = _held(kwargs) | ({"device": CPU} if "device" in kwargs else {})
    out = func(*_held(args), **options)
    if home == CPU:
        return out
    known = {id(each.held): each for each in placed}
    return tree_map_only(Tensor, lambda x: known[id(x)] if id(x) in known else Placed(x, home), out)
