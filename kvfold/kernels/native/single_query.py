# SPDX-License-Identifier: Apache-2.0
"""Decode attention over raw entries with its row of weights, in C++.

Reference: `single_query.attend_with_row` and `single_query.attend_beside` in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvfold.kernels.native.library import call, note_operations

# Of what is returned, whatever defaults a user has set.
FLOATS: Any = {"dtype": torch.float32, "device": "cpu"}


def attend_with_row(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, scale: float, slot: int = -1
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output `[B, 1, Hq, Dv]`, weights `[B, Hq, 1, T]`, and products of the keys with one of them.

    The products `[B, H, T]` are with the key at `slot`, −1: None. query `[B, Hq, 1, D]`, key
    `[B, H, T, D]`, value `[B, H, T, Dv]`, all float32; `hidden [B·H, G or 1, T]` is added to
    logits and products.
    """
    (batch, heads, stored, size), query_heads = key.shape, query.shape[1]
    value_size = value.shape[3]
    key = key if key.stride()[2:] == (size, 1) else key.contiguous()
    value = value if value.stride()[2:] == (value_size, 1) else value.contiguous()
    out = torch.empty(batch, 1, query_heads, value_size, **FLOATS)
    row = torch.empty(batch, query_heads, 1, stored, **FLOATS)
    products = None if slot < 0 else torch.empty(batch, heads, stored, **FLOATS)
    mask = (0, 0, 0)
    if hidden is not None:
        hidden = hidden.float()  # a user's own mask may have any dtype
        hidden = hidden if hidden.stride(2) == 1 else hidden.contiguous()
        mask = hidden.data_ptr(), hidden.stride(0), hidden.stride(1) if hidden.shape[1] > 1 else 0
    call(  # with few calls of Python: a step comes here in every layer
        "attend_with_row",
        query.contiguous(),
        *(key.data_ptr(), *key.stride()[:2], value.data_ptr(), *value.stride()[:2], *mask, slot),
        *(out, row, 0 if products is None else products.data_ptr()),
        *(batch, heads, query_heads // heads, stored, size, value_size),
        *(float(scale), torch.get_num_threads()),
    )
    asked = query_heads * (size + value_size) + (0 if products is None else heads * size)
    note_operations(batch * asked * stored)
    return out, row, products
