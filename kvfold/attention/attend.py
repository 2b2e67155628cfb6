# SPDX-License-Identifier: Apache-2.0
"""Attention over a layer's store, by kernels that observe what the method needs.

Each function takes an `AttentionCall` and returns the output `[B, S, Hq, Dv]`; those that observe
return the call with its observations as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvfold.attention.mask import biased, physical_mask
from kvfold.hf.attention import stock_attention
from kvfold.kernels.column_maxima import NotedPart, attend_with_column_maxima
from kvfold.kernels.column_sums import attend_with_moments
from kvfold.kernels.gather import as_added
from kvfold.kernels.ragged import attend_to_segments
from kvfold.kernels.single_query import attend_beside, attend_with_row
from kvfold.kernels.views import BiasedColumns, RaggedView
from kvfold.observers.call import AttentionCall, PredictedEviction
from kvfold.observers.stored import ProjectedNorms
from kvfold.store.base import Store
from kvfold.store.dense import DenseStore

Observed = tuple[Tensor, AttentionCall]


def attend_to_view(
    module: nn.Module,
    kind: str,
    call: AttentionCall,
    view: Tensor | RaggedView | BiasedColumns | None,
    seen: int,
    mask: Tensor | None,
    options: dict[str, Any],
    holes: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Output `[B, S, Hq, Dv]` over a store's `view`; observes nothing.

    `mask` is the model's, over all `seen` columns.
    """
    if isinstance(view, RaggedView):
        # The logical mask's part for the segments' newest columns.
        newest = None if mask is None else mask[..., seen - view.new : seen]
        out = attend_to_segments(call.query, view, newest, **call.logits)
        return out.transpose(1, 2).contiguous(), None
    if isinstance(view, BiasedColumns):
        stored_mask = physical_mask(mask, view.columns, call.query, seen, holes)
        if call.query.shape[2] == 1:
            added = _with_bias(_per_group(stored_mask, call), view.bias)
            return attend_with_row(call.query, call.key, call.value, added, **call.logits)[0], None
        stored_mask = biased(stored_mask, view.bias, call.query)
    else:
        stored_mask = physical_mask(mask, view, call.query, seen, holes)
    attend = stock_attention(kind, module)
    if call.autocast is not None:
        with torch.autocast(call.query.device.type, call.autocast):
            return attend(module, call.query, call.key, call.value, stored_mask, **options)
    return attend(module, call.query, call.key, call.value, stored_mask, **options)


def attend_and_sum(
    call: AttentionCall,
    store: Store,
    seen: int,
    mask: Tensor | None,
    *,
    counted: Tensor | None,
    squares: bool,
) -> Observed:
    """Observes column sums, and with `squares` their squares, over queries `counted [B, S]`."""
    key, value, stored_mask = _dense(call, store, seen, mask)
    out, sums, of_squares = attend_with_moments(
        call.query, key, value, stored_mask, squares=squares, counted=counted, **call.logits
    )
    return out.transpose(1, 2).contiguous(), call._replace(sums=sums, squares=of_squares)


def attend_and_maximize(
    call: AttentionCall,
    store: Store,
    seen: int,
    mask: Tensor | None,
    *,
    counted: Tensor | None,
    scored: Tensor,
    row_weights: Tensor | None,
    norms: ProjectedNorms | None,
    rms: bool,
    part: NotedPart | None,
) -> Observed:
    """Observes column maxima of a softmax over the `scored [B, N]` columns alone (KVzip).

    With `rms` the roots of mean squares take their place. Fills the `part`, if it can.
    Queries weigh `row_weights [B, S]`, entries the `norms` of their values; None: 1 (KVzip+).
    """
    key, value, stored_mask = _dense(call, store, seen, mask)
    out, maxima = attend_with_column_maxima(
        call.query,
        key,
        value,
        stored_mask,
        scored=scored,
        counted=counted,
        row_weights=row_weights,
        column_weights=None if norms is None else norms(value),
        rms=rms,
        part=part,
        **call.logits,
    )
    return out.transpose(1, 2).contiguous(), call._replace(maxima=maxima)


def attend_and_watch_row(
    call: AttentionCall, store: DenseStore, seen: int, mask: Tensor | None, predicted: int | None
) -> Observed:
    """Observes a single query's attention weights; with a `predicted` slot, its products too."""
    holes, bias = store.hidden, store.bias if store.biased else None
    hidden = None if holes is None else holes.view(-1, 1, holes.shape[2])
    if mask is not None:
        stored_mask = physical_mask(mask, store.stored_columns, call.query, seen)
        hidden = _per_group(stored_mask, call)
    if bias is not None:
        hidden = _with_bias(hidden, bias)
    if predicted is None or (mask is not None and mask.shape[1] > 1):
        out, row = attend_with_row(call.query, call.key, call.value, hidden, **call.logits)
        return out, AttentionCall(*call[:4], row)
    if mask is not None and hidden is not None:
        hidden = hidden[:, :1]  # one model mask for all query heads: a group's see the same entries
    out, row, products = attend_beside(
        call.query, call.key, call.value, hidden, predicted, **call.logits
    )
    return out, AttentionCall(*call[:4], row, predicted=PredictedEviction(predicted, products))


def _dense(
    call: AttentionCall, store: Store, seen: int, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Decoded keys `[B, H, T, D]` and values `[B, H, T, Dv]`, and their mask with any bias."""
    columns: Tensor | None
    if isinstance(store, DenseStore):
        key, value, columns = call.key, call.value, store.stored_columns
    else:
        (key, value), columns = store.dense(), store.columns
    stored_mask, bias = physical_mask(mask, columns, call.query, seen), store.bias
    return key, value, stored_mask if bias is None else biased(stored_mask, bias, call.query)


def _per_group(mask: Tensor | None, call: AttentionCall) -> Tensor | None:
    """Additive mask `[B·H, G or 1, T]` of a single query, from that of `physical_mask`."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = as_added(~mask, call.query.dtype)
    batch, heads = call.key.shape[:2]
    of_heads = mask.expand(batch, max(heads, mask.shape[1]), 1, -1)
    return of_heads.reshape(batch * heads, -1, mask.shape[3])


def _with_bias(hidden: Tensor | None, bias: Tensor) -> Tensor:
    """Additive mask `[B·H, G or 1, T]` with the bias `[B, H, T]` of its entries."""
    added = bias.flatten(0, 1)[:, None]
    return added if hidden is None else hidden + added
