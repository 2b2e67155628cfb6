# SPDX-License-Identifier: Apache-2.0
"""The attention function that transformers calls; stock attention if no cache layer is pending."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from kvfold.attention import handshake
from kvfold.attention.padding import check_announced
from kvfold.errors import KvfoldError
from kvfold.hf.attention import logit_options, register_attention, stock_attention
from kvfold.kernels.full_precision import any_cast, is_cast
from kvfold.observers.call import AttentionCall

# Of a layer, or of a guest to its view
Attend = Callable[..., tuple[Tensor, Tensor | None]]


def _attention(
    kind: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention output `[B, S, Hq, Dv]` and weights; `kind` is the stock attention beneath.

    query `[B, Hq, S, D]`, key `[B, H, T, D]`, value `[B, H, T, Dv]`. Raises UnsupportedModel as
    `handshake.claim`, and for a second attention to the same keys.
    """
    pending, mask = handshake.pending, attention_mask
    if pending.graph_layer is not None:
        graph_layer = pending.graph_layer
        handshake.forget()
        return graph_layer.attend(module, query, options), None
    mark: Any = getattr(key, "_kvfold", None)
    if pending.layer is None and mark is None:
        if handshake.was_done(key):
            raise handshake.changed(module)
        return stock_attention(kind, module)(module, query, key, value, mask, **options)
    # Never part of a graph, in which the handshake's references would be lost.
    if is_dynamo_compiling():
        return _outside_of_graphs(kind, module, query, key, value, mask, **options)
    if torch.is_grad_enabled():
        with torch.no_grad():
            out, weights = _attention(kind, module, query, key, value, mask, **options)
        return _WithoutGradient.apply(out, query), weights
    layer = handshake.claim(module, key, value)
    source = None if mark is None or layer is not None else mark[0]()
    attend: Attend
    if layer is not None:
        attend = layer.attend
    elif source is not None:
        attend = partial(source.attend_as_guest, view=mark[1])
    else:  # attention without a kvfold cache
        return stock_attention(kind, module)(module, query, key, value, mask, **options)
    call = AttentionCall(query, key, value, logit_options(module, query, options))
    if any_cast() and is_cast(query):
        attend_call = partial(attend, module, kind, mask=mask, options=options)
        return _outside_of_autocast(attend_call, call)
    return attend(module, kind, call, mask=mask, options=options)


_outside_of_graphs = torch.compiler.disable(_attention)


def _outside_of_autocast(attend: Attend, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """As `attend(call)`, whose stock attention alone is under torch.autocast; in its dtype."""
    device, given = call.query.device.type, (call.query, call.key, call.value)
    wide = reduce(torch.promote_types, (each.dtype for each in given))
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        query, key, value = (each.to(wide) for each in given)
        call = call._replace(query=query, key=key, value=value, autocast=dtype)
        out, weights = attend(call)
    return out if wide == torch.float64 else out.to(dtype), weights  # float64 is never cast


class _WithoutGradient(torch.autograd.Function):
    """Attention output that refuses a gradient, as stored entries have no autograd history."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise KvfoldError(
            "no gradient passes through a kvfold cache, whose entries are kept without history: "
            "train without it, and generate under torch.no_grad()"
        )


for _kind in ("sdpa", "eager"):
    register_attention(_kind, partial(_attention, _kind), check_announced)
