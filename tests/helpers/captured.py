# SPDX-License-Identifier: Apache-2.0
"""A recorder that refuses what a CUDA graph cannot hold, and notes what steps leave behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvfold.generation.static import captured
from kvfold.generation.static.recorder import Step

# Operations whose result the host must wait for, or that bring numbers of the host.
OF_HOST = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "lift_fresh",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
    "_unique2",
}


class NoHost(TorchDispatchMode):
    """Fails at an operation of `OF_HOST`, at a copy to another device and at a mask as an index."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name.removeprefix("aten::")
        assert name not in OF_HOST, f"{name} waits for the host"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [each for each in args[1] if each is not None and each.dtype == torch.bool]
            assert not masks, f"{name} by a mask has as many results as the device says"
        out = function(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            assert out.device == args[0].device == args[-1 if name == "copy_" else 0].device
        return out


class Watching:
    """Runs steps as the CPU's recorder does, replays under `NoHost`; notes `steps` by kind."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.cache: captured.CapturedCache | None = None
        self.held: dict[str, int] = {}

    def warm_up(self, step: Step) -> Any:
        self.steps.append("warm")
        out = step()  # may bring numbers of the host, and make what is kept for later steps
        self.held = addresses(self.cache)
        return out

    def record(self, step: Step) -> Step:
        self.steps.append("record")

        def replay() -> Any:
            self.steps.append("replay")
            assert_same(self.held, addresses(self.cache), "between two rounds")
            with NoHost():
                out = step()
            assert_same(self.held, addresses(self.cache), "inside a step")
            return out

        return replay


def assert_same(before: dict[str, int], after: dict[str, int], when: str) -> None:
    """Fails if anything that was there before is elsewhere; views may have been added."""
    moved = [name for name, at in before.items() if after[name] != at]
    assert not moved, f"{moved} moved {when}"


def addresses(cache: captured.CapturedCache | None) -> dict[str, int]:
    """Where everything lies that outlives a step, by its path from the layers."""
    assert cache is not None
    found: dict[str, int] = {}
    for number, layer in enumerate(cache.layers):
        for name, held in vars(layer).items():
            if name != "layer":
                _add(found, f"{number}.{name}", held)
    return found


def _add(found: dict[str, int], path: str, held: Any) -> None:
    """Adds the tensors in `held`, in lists, mappings and views."""
    if isinstance(held, Tensor):
        found[path] = held.data_ptr()
    elif isinstance(held, dict):
        for name, each in held.items():
            _add(found, f"{path}.{name}", each)
    elif isinstance(held, list | tuple):
        for i, each in enumerate(held):
            _add(found, f"{path}.{i}", each)
    elif type(held).__module__.startswith("kvfold.kernels"):
        _add(found, path, vars(held))


def watching(monkeypatch: Any) -> Watching:
    """A recorder that every `capture=True` uses while the test runs."""
    watch, begin = Watching(), captured.CapturedStep.__init__

    def noted(step: Any, model: Any, cache: captured.CapturedCache, recorder: Any) -> None:
        watch.cache = cache
        begin(step, model, cache, watch)

    monkeypatch.setattr(captured.CapturedStep, "__init__", noted)
    return watch
