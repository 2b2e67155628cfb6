# SPDX-License-Identifier: Apache-2.0
"""The one attention function: attends to what is stored, and lets the layer observe."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import Tensor, nn

from kvfold import compat
from kvfold.kernels.chunked import attend_with_column_sums
from kvfold.layer import Attended, CompressedLayer
from kvfold.mask import physical_mask, valid_columns


class _Pending(threading.local):
    """The layer whose keys were just updated; for models that transform them before attention."""

    index: int | None = None
    layer: CompressedLayer | None = None


_pending = _Pending()


def hand_out(keys: Tensor, index: int, layer: CompressedLayer) -> Tensor:
    """Marks keys on their way to attention with the layer they come from.

    The mark is on an alias, so that the stored tensor can be copied and saved.
    """
    alias = keys.view(keys.shape)
    assert layer.store is not None
    alias._kvfold = (weakref.ref(layer), layer.store.stored_positions)  # type: ignore[attr-defined]
    _pending.index, _pending.layer = index, layer
    return alias


def forget_pending() -> None:
    """Clears the mark left by an update whose attention never came."""
    _pending.index = _pending.layer = None


def _attention(
    kind: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    attend = compat.delegate(kind, module)
    index, pending = _pending.index, _pending.layer
    forget_pending()
    mark = getattr(key, "_kvfold", None)
    if mark is not None:
        layer, positions = mark[0](), mark[1]
    elif pending is not None and _expanded(pending, key, index == module.layer_idx):
        assert pending.store is not None
        layer, positions = pending, pending.store.stored_positions
    else:
        layer = None
    if layer is None:
        return attend(module, query, key, value, attention_mask, **kwargs)
    # A layer that shares another's keys attends to them, but does not decide about them.
    owns = layer is pending
    if owns:
        layer.owner.check(module)
        layer.owner.answered()
        if attention_mask is not None:
            layer.valid = valid_columns(attention_mask)
    mask = physical_mask(attention_mask, positions, query, layer.seen)
    scale = compat.head_scale(module, query, kwargs.get("scaling"))
    softcap, sinks = compat.softcap_of(kwargs), compat.sinks_of(kwargs)
    sums = None
    if owns and layer.sums_wanted:
        attended, sums = attend_with_column_sums(
            query, key, value, mask,
            scale=scale, softcap=softcap, sinks=sinks, counted=layer.counted(query.shape[2]),
        )  # fmt: skip
        out: tuple[Tensor, Tensor | None] = (attended.transpose(1, 2).contiguous(), None)
    else:
        out = attend(module, query, key, value, mask, **kwargs)
    if owns:
        layer.finish(Attended(query, key, value, scale, softcap, sinks, sums))
    return out


def _expanded(layer: CompressedLayer, key: Tensor, same_layer: bool) -> bool:
    """Whether `key [B, H, T, D]` was made from the latents that `layer` just handed out."""
    if layer.store is None or not same_layer:
        return False
    latents = layer.store.keys
    if latents.shape[1] == key.shape[1]:
        return False
    return (latents.shape[0], latents.shape[2]) == (key.shape[0], key.shape[2])


def sdpa_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """kvfold over `scaled_dot_product_attention`."""
    return _attention("sdpa", *args, **kwargs)


def eager_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """kvfold over the model file's own eager attention."""
    return _attention("eager", *args, **kwargs)


compat.register_attention("sdpa", sdpa_attention)
compat.register_attention("eager", eager_attention)
