# SPDX-License-Identifier: Apache-2.0
"""The handshake by which attention finds the cache layer whose entries it was given.

transformers gives an attention function keys and values, but not the cache they come from. The
model's module calls `cache.update` and then, in the same thread, attention:

1. `cache.update` stores the new entries and calls `hand_out`, which remembers the layer and weak
   references to the keys and values that it returns.
2. The attention function calls `claim` with the keys that it was given. They are the layer's where
   they are the same tensors, where they carry its mark, or where the model has expanded them from
   the layer's latents. Anything else is attention without a kvfold cache.
3. After the layer has attended, `done` remembers the keys: a second attention to them is refused,
   since the layer may have evicted entries in between.

Models whose layers share entries (`num_kv_shared_layers`) attend to keys of an earlier layer much
later: such keys are marked with the layer and with what was stored when they were handed out.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from torch import Tensor, nn

from kvfold.errors import UnsupportedModel
from kvfold.observers.call import AttentionCall


class AttendingLayer(Protocol):
    """A cache layer that computes the attention over its stored entries."""

    shared: bool  # later layers attend to its entries as well
    caches_latents: bool  # keys are made from its entries, inside the forward

    def view(self) -> Any:
        """View of the store."""

    def is_source_of(self, key: Tensor) -> bool:
        """True if keys `[B, H, T, D]` were expanded from its latents."""

    def attend(
        self,
        module: nn.Module,
        kind: str,
        call: AttentionCall,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Attention output `[B, S, Hq, Dv]`; observes, and evicts when due."""

    def attend_as_guest(
        self,
        module: nn.Module,
        kind: str,
        call: AttentionCall,
        view: Any,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of another layer to `view` of its entries; it observes nothing."""


class GraphLayer(Protocol):
    """A layer inside a compiled graph, which attends to its own buffers."""

    def attend(self, module: nn.Module, query: Tensor, options: dict[str, Any]) -> Tensor:
        """Attention output `[B, 1, Hq, Dv]` of `query [B, Hq, 1, D]`."""


class _Pending(threading.local):
    """The layer whose entries were updated last, and the tensors on their way to attention."""

    index: int | None = None
    layer: AttendingLayer | None = None
    graph_layer: GraphLayer | None = None
    keys: weakref.ref[Tensor] | None = None
    values: weakref.ref[Tensor] | None = None
    done: weakref.ref[Tensor] | None = None


pending = _Pending()


def hand_out(keys: Tensor, values: Tensor, index: int, layer: AttendingLayer) -> Tensor:
    """Remembers keys and values on their way to attention; returns the keys to give the model.

    Shared keys are returned as a marked alias, so that the stored tensor itself can be copied.
    """
    pending.index, pending.layer, pending.graph_layer = index, layer, None
    pending.keys, pending.values, pending.done = weakref.ref(keys), weakref.ref(values), None
    if not layer.shared:
        return keys
    alias = keys.view(keys.shape)
    alias._kvfold = (weakref.ref(layer), layer.view())  # type: ignore[attr-defined]
    return alias


def expect(layer: GraphLayer) -> None:
    """Announces that the next attention is that of `layer`, in a compiled graph."""
    pending.graph_layer = layer


def forget() -> None:
    """Clears the pending layer, after an update without attention."""
    pending.index = pending.layer = pending.graph_layer = None
    pending.keys = pending.values = pending.done = None


def was_done(key: Tensor) -> bool:
    """True if these keys were attended to already."""
    return pending.done is not None and pending.done() is key


def claim(module: nn.Module, key: Tensor, value: Tensor) -> AttendingLayer | None:
    """The pending layer, if it handed out these keys and values; only then it is pending no longer.

    None for attention without a cache, and for keys that another layer marked. Raises
    UnsupportedModel if keys or values were changed on the way.
    """
    layer, handed, values = pending.layer, pending.keys, pending.values
    if layer is None:
        return None
    mark = getattr(key, "_kvfold", None)
    if mark is not None:
        if mark[0]() is not layer:
            return None
    elif handed is None or handed() is not key:
        if pending.index != getattr(module, "layer_idx", None) or not layer.is_source_of(key):
            return None
        if not layer.caches_latents:
            raise changed(module)
    if not layer.caches_latents and (values is None or values() is not value):
        raise changed(module)
    pending.index = pending.layer = pending.keys = pending.values = None
    pending.done = handed
    return layer


def changed(module: nn.Module) -> UnsupportedModel:
    """Error for a model that changes keys, values or the mask, or attends to them twice."""
    return UnsupportedModel(
        f"{type(module).__name__} attends several times after one cache update, or changes keys, "
        "values or the mask between the two: kvfold cannot tell what its entries receive"
    )
