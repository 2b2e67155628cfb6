# SPDX-License-Identifier: Apache-2.0
"""Decode attention over quantized entries; torch.compile fuses dequantization into the products."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Unpack

import torch
from torch import Tensor

from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.packing import PackedKeys, PackedValues, dequantize
from kvfold.kernels.single_query import softmax_beside
from kvfold.kernels.views import RaggedView

# The `backend` argument of torch.compile: a compiler's name, or the compiler
Backend = str | Callable[..., Any]


def both_packed(stored: RaggedView) -> tuple[PackedKeys, PackedValues] | None:
    """Packed keys and packed values; None unless both are packed."""
    keys, values = stored.keys.encoded, stored.values.encoded
    if isinstance(keys, PackedKeys) and isinstance(values, PackedValues):
        return keys, values
    return None


def reads_packed(stored: RaggedView) -> bool:
    """True if keys and values are packed, all segments are equally long, and on a CPU."""
    both = both_packed(stored)
    if both is None:
        return False
    keys, values = both
    # torch.compile specializes on sizes 0 and 1: a graph with them serves no other length.
    enough = keys.lengths[0] > keys.group and values.lengths[0] > 1
    even = stored.keys.even and stored.values.even
    return enough and even and stored.keys.tail.device.type == "cpu"


def attend_to_packed_segments(
    query: Tensor,
    stored: RaggedView,
    *,
    backend: Backend,
    **options: Unpack[LogitOptions],
) -> Tensor:
    """Attention output `[B, Hq, 1, Dv]` of `query [B, Hq, 1, D]`; needs `reads_packed(stored)`.

    `backend` compiles the products with packed entries, once for all lengths.
    """
    both = both_packed(stored)
    assert both is not None
    keys, values = both
    segments, packed = len(keys.lengths), values.lengths[0]
    grouped = (query * options["scale"]).reshape(segments, -1, query.shape[-1])
    products = _compiled(_products_with_keys, keys.bits, keys.group, backend)
    logits = torch.cat(
        [
            products(grouped, *_tensors(keys, segments)),
            grouped @ stored.keys.newest.transpose(1, 2),
        ],
        -1,
    )
    softcap = options.get("softcap")
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    weights = softmax_beside(logits, options.get("sink_logits")).to(query.dtype)
    sums = _compiled(_sum_of_values, values.bits, values.group, backend)
    of_packed = weights[..., :packed].contiguous()
    torch._dynamo.maybe_mark_dynamic(of_packed, 2)
    mixed = sums(of_packed, *_tensors(values, segments)).to(query.dtype)
    mixed = torch.baddbmm(mixed, weights[..., packed:], stored.values.newest)
    return mixed.view(*query.shape[:3], -1)


def _tensors(packed: PackedKeys | PackedValues, segments: int) -> list[Tensor]:
    """Words, scale and minimum `[segments, …, …]`, the second axis marked as dynamic."""
    tensors = [rows.view(segments, -1, rows.shape[1]) for rows in packed.tensors()]
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    return tensors


@lru_cache(maxsize=64)
def _compiled(
    function: Callable[..., Tensor], bits: int, group: int, backend: Backend
) -> Callable[..., Tensor]:
    def with_constants(*tensors: Tensor) -> Tensor:
        return function(*tensors, bits, group)

    return torch.compile(with_constants, backend=backend)


def _products_with_keys(
    query: Tensor, words: Tensor, scale: Tensor, minimum: Tensor, bits: int, group: int
) -> Tensor:
    """Products `[R, G, n]` of `query [R, G, D]` and packed keys, n in each of R segments.

    words `[R, n·bits/32, D]`; scale and minimum `[R, n/group, D]`.
    """
    # The words of each group: [R, groups, group·bits/32, D].
    words = words.unflatten(1, (-1, group * bits // 32))
    scale, minimum = scale[:, :, None], minimum[:, :, None]
    columns = [column[:, None, None] for column in _wide(query).unbind(1)]
    found = [
        torch.stack([(keys * column).sum(-1) for column in columns], 1)
        for keys in _decoded(words, scale, minimum, bits)
    ]
    return torch.stack(found, -1).flatten(2)


def _sum_of_values(
    weights: Tensor, words: Tensor, scale: Tensor, minimum: Tensor, bits: int, group: int
) -> Tensor:
    """Sums `[R, G, Dv]` of packed values, weighted `[R, G, n]`, in each of R segments.

    words `[R, n, Dv·bits/32]`; scale and minimum `[R, n, Dv/group]`.
    """
    each = group * bits // 32
    scale, minimum = (of[..., None].expand(-1, -1, -1, each).flatten(2) for of in (scale, minimum))
    rows = [row[..., None] for row in _wide(weights).unbind(1)]
    mixed = [
        torch.stack([(values * row).sum(1) for row in rows], 1)
        for values in _decoded(words, scale, minimum, bits)
    ]
    return torch.stack(mixed, -1).flatten(2)


def _decoded(words: Tensor, scale: Tensor, minimum: Tensor, bits: int) -> list[Tensor]:
    """Dequantized numbers: the first of each word, the second, and so on; at least float32.

    One scalar shift each: a shift of a vector by a vector takes three times as long.
    """
    codes = [words >> shift & 2**bits - 1 for shift in range(0, 32, bits)]
    return [_wide(dequantize(code, scale, minimum)) for code in codes]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
