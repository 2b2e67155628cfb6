# SPDX-License-Identifier: Apache-2.0
"""The one attention function: attends to what is stored, and lets the layer observe."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.attention.mask import as_added, physical_mask, valid_columns
from kvfold.attention.padding import check_announced
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.query_window import Attended, Foreseen
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.generation.static.layer import FixedLayer
from kvfold.hf.attention import (
    head_scale,
    register_attention,
    sinks_of,
    softcap_of,
    stock_attention,
)
from kvfold.kernels.column_maxima import attend_with_column_maxima
from kvfold.kernels.column_sums import attend_with_moments
from kvfold.kernels.ragged import attend_to_segments
from kvfold.kernels.single_query import attend_beside, attend_single, attend_with_row
from kvfold.store.dense import DenseStore
from kvfold.store.ragged import Segments, SegmentStore


class _Pending(threading.local):
    """The layer whose entries were just updated, and these; `done` were attended to."""

    index: int | None = None
    layer: CompressedLayer | FixedLayer | None = None
    keys: weakref.ref[Tensor] | None = None
    values: weakref.ref[Tensor] | None = None
    done: weakref.ref[Tensor] | None = None


_pending = _Pending()


def hand_out(keys: Tensor, values: Tensor, index: int, layer: CompressedLayer) -> Tensor:
    """Remembers keys and values on their way to attention, and the layer they come from.

    Keys that several layers attend to are marked with it, and with what is stored now, which may
    have changed by then; the mark is on an alias, so that what is stored can be copied and saved.
    """
    _pending.index, _pending.layer = index, layer
    _pending.keys, _pending.values = weakref.ref(keys), weakref.ref(values)
    if not layer.plan.shared:
        return keys
    alias = keys.view(keys.shape)
    alias._kvfold = (weakref.ref(layer), layer.stored().view())  # type: ignore[attr-defined]
    return alias


def expect(index: int, layer: FixedLayer) -> None:
    """The next attention is that of a layer in a compiled graph, to what it holds."""
    _pending.index, _pending.layer = index, layer


def forget_pending() -> None:
    """Clears the mark left by an update whose attention never came."""
    _pending.index = _pending.layer = _pending.keys = _pending.values = _pending.done = None


def _attention(
    kind: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    pending, mark = _pending.layer, getattr(key, "_kvfold", None)
    if isinstance(pending, FixedLayer):
        forget_pending()
        return pending.attend(module, query, kwargs), None
    if pending is None and mark is None:
        if _pending.done is not None and _pending.done() is key:
            raise _changed(module)
        attend = stock_attention(kind, module)
        return attend(module, query, key, value, attention_mask, **kwargs)
    return _attend_to_stored(kind, module, query, key, value, attention_mask, **kwargs)


class _WithoutGradient(torch.autograd.Function):
    """An attention output whose gradient is refused: entries are kept without their history."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise KvfoldError(
            "no gradient passes through a kvfold cache, whose entries are kept without history: "
            "train without it, and generate under torch.no_grad()"
        )


@torch.compiler.disable
def _attend_to_stored(
    kind: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention to what a layer handed out; never part of a graph, which would not find it."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            out, weights = _attend_to_stored(
                kind, module, query, key, value, attention_mask, **kwargs
            )
        return _WithoutGradient.apply(out, query), weights
    attend = stock_attention(kind, module)
    index, pending, handed = _pending.index, _pending.layer, _pending.keys
    values = _pending.values
    forget_pending()
    assert not isinstance(pending, FixedLayer)
    mark = getattr(key, "_kvfold", None)
    layer: CompressedLayer | None = None
    if mark is not None:
        layer = mark[0]()
    elif pending is not None:
        same = handed is not None and handed() is key
        made = not same and _expanded(pending, key, index == module.layer_idx)
        if made and not pending.plan.latents:
            raise _changed(module)
        if same or made:
            layer = pending
    if layer is None:
        return attend(module, query, key, value, attention_mask, **kwargs)
    # A layer that shares another's keys attends to them, but does not decide about them.
    owns = layer is pending
    if owns:
        layer.owner.check(module)
        whole = layer.plan.latents or (values is not None and values() is value)
        if not whole or (attention_mask is not None and attention_mask.shape[-1] != layer.seen):
            raise _changed(module)
        if attention_mask is not None:
            layer.logical.valid = valid_columns(attention_mask)
    scale = head_scale(module, query, kwargs.get("scaling"))
    softcap, sinks = softcap_of(kwargs), sinks_of(kwargs)
    attended = Attended(query, key, value, scale, softcap, sinks)
    weights = None
    if owns and layer.evicts_one(query.shape[2]):
        out, attended = _observed_one(layer, attended, attention_mask)
    elif owns and (layer.sums_wanted or layer.turn.repeating is not None):
        out, attended = _observed(layer, attended, attention_mask)
    elif owns and kind == "sdpa" and layer.shows_all(attended, attention_mask):
        # Nothing left of the stock cache to be identical to, and faster than the delegate.
        out = attend_single(query, key, value, scale).transpose(1, 2)
    else:
        store = layer.stored()
        view = store.view() if mark is None else mark[1]
        if isinstance(view, Segments):
            out = _attend_to_segments(layer, view, attended, attention_mask)
        else:
            # A layer that shares entries may see them as they were before.
            holes = store.holes if owns and isinstance(store, DenseStore) else None
            mask = physical_mask(attention_mask, view, query, layer.seen, holes)
            out, weights = attend(module, query, key, value, mask, **kwargs)
    if owns:
        layer.finish(attended)
        # Not before: after an error on the way the layers no longer hold the same tokens.
        layer.owner.answered()
        _pending.done = handed
    return out, weights


def _changed(module: nn.Module) -> UnsupportedModel:
    """Attention to something else than the entries of one update, once, by a mask of all seen."""
    return UnsupportedModel(
        f"{type(module).__name__} attends several times after one cache update, or changes keys, "
        "values or the mask between the two: kvfold cannot tell what its entries receive"
    )


def _attend_to_segments(
    layer: CompressedLayer, view: Segments, attended: Attended, mask: Tensor | None
) -> Tensor:
    a = attended
    # Of a logical mask, the part that is about the segments' last columns.
    newest = None if mask is None else mask[..., layer.seen - view.new : layer.seen]
    out = attend_to_segments(a.query, view, newest, scale=a.scale, softcap=a.softcap, sinks=a.sinks)
    return out.transpose(1, 2).contiguous()


def _observed(
    layer: CompressedLayer, attended: Attended, mask: Tensor | None
) -> tuple[Tensor, Attended]:
    """Attention by kvfold's own kernels, which see what each entry receives."""
    key, value, store = attended.key, attended.value, layer.stored()
    positions = store.view()
    if isinstance(store, SegmentStore):
        (key, value), positions = store.dense(), store.positions
    assert not isinstance(positions, Segments)
    mask = physical_mask(mask, positions, attended.query, layer.seen)
    options: dict[str, Any] = {
        "scale": attended.scale,
        "softcap": attended.softcap,
        "sinks": attended.sinks,
        "counted": layer.counted(attended.query.shape[2]),
    }
    maxima = sums = squares = None
    if layer.turn.repeating is not None:
        scored = layer.turn.repeating.scored
        out, maxima = attend_with_column_maxima(
            attended.query, key, value, mask, scored=scored, **options
        )
    else:
        wanted = layer.plan.stages.needs.column_squares
        out, sums, squares = attend_with_moments(
            attended.query, key, value, mask, squares=wanted, **options
        )
    seen = attended._replace(sums=sums, squares=squares, maxima=maxima)
    return out.transpose(1, 2).contiguous(), seen


def _observed_one(
    layer: CompressedLayer, attended: Attended, mask: Tensor | None
) -> tuple[Tensor, Attended]:
    """The attention of a single query, by a kernel that shows its row."""
    a, store = attended, layer.stored()
    assert isinstance(store, DenseStore)
    heads = a.key.shape[1]
    if mask is None:
        hidden = store.hidden
        hidden = None if hidden is None else hidden[:, :, None]
    else:
        hidden = physical_mask(mask, store.view(), a.query, layer.seen)
        assert hidden is not None
        if hidden.dtype == torch.bool:
            hidden = as_added(~hidden, a.query.dtype)
        hidden = hidden[:, :, 0].unflatten(1, (heads if hidden.shape[1] > 1 else 1, -1))
    expected = layer.expected(a)
    if expected is None:
        out, row = attend_with_row(
            a.query, a.key, a.value, hidden, scale=a.scale, softcap=a.softcap, sinks=a.sinks
        )
        return out.transpose(1, 2), a._replace(row=row)
    other = a.key[:, :, expected : expected + 1]
    out, row, products = attend_beside(
        a.query, a.key, a.value, hidden, other, scale=a.scale, sinks=a.sinks
    )
    return out.transpose(1, 2), a._replace(row=row, foreseen=Foreseen(expected, products))


def _expanded(layer: CompressedLayer, key: Tensor, same_layer: bool) -> bool:
    """Whether `key [B, H, T, D]` was made from what `layer` just handed out, as from latents."""
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


register_attention("sdpa", sdpa_attention, check_announced)
register_attention("eager", eager_attention, check_announced)
