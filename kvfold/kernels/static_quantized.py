# SPDX-License-Identifier: Apache-2.0
"""Decode attention over quantized entries; torch.compile fuses dequantization into the products."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Unpack

import torch
from torch import Tensor

from kvfold.kernels import per_token_products
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.packing import PackedKeys, PackedValues, dequantize
from kvfold.kernels.per_token import PerTokenEncoded, RotatedKeys, TokenValues
from kvfold.kernels.single_query import softmax_beside
from kvfold.kernels.views import PartView, RaggedView

# The `backend` argument of torch.compile: a compiler's name, or the compiler
Backend = str | Callable[..., Any]
Quantized = PackedKeys | PackedValues | PerTokenEncoded


def both_packed(stored: RaggedView) -> tuple[PackedKeys, PackedValues] | None:
    """Packed keys and packed values; None unless both are packed."""
    keys, values = stored.keys.encoded, stored.values.encoded
    if isinstance(keys, PackedKeys) and isinstance(values, PackedValues):
        return keys, values
    return None


def both_alone(stored: RaggedView) -> tuple[RotatedKeys, TokenValues] | None:
    """Keys and values that were quantized one by one; None unless both were."""
    keys, values = stored.keys.encoded, stored.values.encoded
    if isinstance(keys, RotatedKeys) and isinstance(values, TokenValues):
        return keys, values
    return None


def reads_quantized(stored: RaggedView) -> bool:
    """True if keys and values are quantized, all segments are equally long, and on a CPU."""
    even = stored.keys.even and stored.values.even and stored.keys.tail.device.type == "cpu"
    packed, alone = both_packed(stored), both_alone(stored)
    # torch.compile specializes on sizes 0 and 1: a graph with them serves no other length.
    if packed is not None:
        keys, values = packed
        return even and keys.lengths[0] > keys.group and values.lengths[0] > 1
    return even and alone is not None and alone[0].even and alone[0].codes.lengths[0] > 1


def attend_to_quantized_segments(
    query: Tensor,
    stored: RaggedView,
    *,
    backend: Backend,
    **options: Unpack[LogitOptions],
) -> Tensor:
    """Attention output `[B, Hq, 1, Dv]` of `query [B, Hq, 1, D]`; needs `reads_quantized(stored)`.

    `backend` compiles the products with quantized entries, once for all lengths. Whole entries of a
    segment come after its quantized ones.
    """
    both = both_packed(stored) or both_alone(stored)
    assert both is not None
    keys, values = both
    segments = len(keys.lengths)
    grouped = (query * options["scale"]).reshape(segments, -1, query.shape[-1])
    asked = keys.asked(grouped) if isinstance(keys, RotatedKeys) else grouped
    of_keys = _compiled(*_products_with(keys), backend)
    logits = torch.cat(
        [
            of_keys(asked, *_tensors(keys, segments)).to(query.dtype),
            grouped @ _raw(keys, stored.keys).transpose(1, 2),
        ],
        -1,
    )
    softcap = options.get("softcap")
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    weights = softmax_beside(logits, options.get("sink_logits")).to(query.dtype)
    raw = _raw(values, stored.values)
    of_quantized, of_raw = weights.split([weights.shape[-1] - raw.shape[1], raw.shape[1]], -1)
    of_quantized = of_quantized.contiguous()
    torch._dynamo.maybe_mark_dynamic(of_quantized, 2)
    sums = _compiled(*_products_with(values), backend)
    mixed = sums(of_quantized, *_tensors(values, segments)).to(query.dtype)
    return torch.baddbmm(mixed, of_raw, raw).view(*query.shape[:3], -1)


def _products_with(encoded: Quantized) -> tuple[Callable[..., Tensor], tuple[int, ...]]:
    """The function of products with keys, or of sums of values, and its constants."""
    if isinstance(encoded, PerTokenEncoded):
        of_keys, of_values = per_token_products.products_with_keys, per_token_products.sum_of_values
        return of_keys if isinstance(encoded, RotatedKeys) else of_values, (encoded.bits,)
    of_packed = _products_with_keys if isinstance(encoded, PackedKeys) else _sum_of_values
    return of_packed, (encoded.bits, encoded.group)


def _raw(encoded: Quantized, part: PartView) -> Tensor:
    """Entries `[segments, n, D]` that are not quantized."""
    return encoded.raw_beside(part) if isinstance(encoded, PerTokenEncoded) else part.newest


def _tensors(encoded: Quantized, segments: int) -> list[Tensor]:
    """Codes and scales `[segments, …, …]`, the second axis marked as dynamic."""
    flat = encoded.tensors()
    if isinstance(encoded, PerTokenEncoded):
        flat = [encoded.codes.rows, encoded.scales.rows]
    tensors = [rows.view(segments, -1, rows.shape[1]) for rows in flat]
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    return tensors


@lru_cache(maxsize=64)
def _compiled(
    function: Callable[..., Tensor], constants: tuple[int, ...], backend: Backend
) -> Callable[..., Tensor]:
    def with_constants(*tensors: Tensor) -> Tensor:
        return function(*tensors, *constants)

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
