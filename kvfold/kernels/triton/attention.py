# SPDX-License-Identifier: Apache-2.0
"""Decode attention to segments of any length and encoding: each entry is read once, in one launch.

A program handles a part of one row's KV head, for all query heads of its group; `merged` joins the
parts. A `LaunchPlan` says which, so that a step reads nothing back, and a CUDA graph can hold it.

References: attention to each segment alone, decoded (`reference.attend_with_column_sums`). Run in
Triton's interpreter, and compiled for compute capability 8.9 and 9.0 (shared memory). Not run on a
GPU yet: block sizes, stages and the plan's number of programs are those of the kernels before it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.codebook import centroids
from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.triton.codes import packed_keys, packed_values, rotated_keys, token_values
from kvfold.kernels.triton.device import on_its_device
from kvfold.kernels.triton.online_softmax import (
    LOG2_E,
    add_block,
    dot_dtype,
    logits_of,
    merged,
    store_part,
    wide,
)
from kvfold.kernels.triton.plan import BLOCK, LaunchPlan
from kvfold.kernels.views import Flat

# Largest row, in bytes, that is read BLOCK entries at a time
NARROW = 256


class Segments(NamedTuple):
    """Encoded keys and values of R segments, both of one kind, and the bias of each, float32."""

    keys: Flat | PackedKeys | RotatedKeys
    values: Flat | PackedValues | TokenValues
    bias: Tensor | None = None  # [sum of lengths of keys]

    @property
    def lengths(self) -> tuple[list[int], list[int]]:
        """Encoded keys of each segment, and encoded values."""
        if isinstance(self.keys, RotatedKeys) and isinstance(self.values, TokenValues):
            return self.keys.codes.lengths, self.values.codes.lengths
        return self.keys.lengths, self.values.lengths


class Rectangle(NamedTuple):
    """Raw entries of R segments, beside others of them: a segment's slots from its gap on.

    Where `visible` is false, there is none: it tells the kernel how far a buffer is filled.
    """

    keys: Tensor  # [R, T, D]
    values: Tensor  # [R, T, Dv]
    bias: Tensor | None = None  # [R, T], float32
    visible: Tensor | None = None  # [R, T]


@on_its_device
def attend(
    query: Tensor,
    plan: LaunchPlan,
    old: Segments | None,
    rectangles: tuple[Rectangle | None, Rectangle | None],
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention output `[R, G, Dv]` of `query [R, G, D]`, and log-sum-exp `[R, G]`, float32.

    Of `old` entries, those of the first rectangle, and those of the second; the first has neither
    bias nor mask. Sink logits `[Hq]` count in the log-sum-exp. A segment without any entry gives 0
    and −inf. The output has the query's dtype.
    """
    segments, groups, size = query.shape
    pointers, options, value_size = _of_old(query, old)
    beside, tail = rectangles
    for given, room in zip(rectangles, plan.rooms, strict=True):
        assert (0 if given is None else given.keys.shape[1]) <= room
    value_size = value_size if tail is None else tail.values.shape[-1]
    programs = len(plan.segment)
    parts = query.new_empty(programs, groups, value_size, dtype=torch.float32)
    sums = query.new_empty(programs, groups, dtype=torch.float32)
    if programs:
        _attend[(programs,)](
            query.contiguous(),
            *pointers,
            *_of_rectangle(beside)[:5],
            *_of_rectangle(tail),
            plan.segment,
            plan.part,
            plan.key_starts,
            plan.value_starts,
            plan.lengths,
            plan.gaps,
            parts,
            sums,
            plan.size,
            scale,
            softcap or 0.0,
            segments,
            groups,
            size,
            value_size,
            CAPPED=softcap is not None,
            G=wide(groups),
            D=wide(size),
            DV=wide(value_size),
            DOT=dot_dtype(query),
            **options,
            **launch_options(max(size, value_size) * query.element_size()),
        )
    return merged(parts, sums, plan.first, sink_logits, query.dtype)


def launch_options(row_bytes: int) -> dict[str, int]:
    """Block size and pipeline stages, for rows of `row_bytes`.

    Up to `dispatch.LARGEST`, 99 KB of shared memory suffice (compute capability 8.6 and 8.9).
    """
    if row_bytes > NARROW:
        return {"N": BLOCK // 2, "num_stages": 2}
    return {"N": BLOCK, "num_stages": 3}


def _of_old(query: Tensor, old: Segments | None) -> tuple[list[Any], dict[str, Any], int]:
    """Tensors and constants of the kernel for `old` entries, and the size of a value."""
    kinds: dict[str, Any] = {"KIND": "none", "KEY_BITS": 0, "VALUE_BITS": 0}
    kinds |= {"KEY_GROUP": 0, "VALUE_GROUP": 0}
    if old is None:
        return [None] * 9, kinds, 0
    keys, values, bias = old
    if isinstance(keys, Flat) and isinstance(values, Flat):
        of_keys, of_values = [keys.rows.contiguous(), None, None], [values.rows.contiguous()]
        tensors = [None, *of_keys, *of_values, None, None, None]
        return [*tensors, bias], kinds | {"KIND": "raw"}, values.rows.shape[1]
    assert not isinstance(keys, Flat) and not isinstance(values, Flat)
    kinds |= {"KEY_BITS": keys.bits, "VALUE_BITS": values.bits}
    if isinstance(keys, PackedKeys) and isinstance(values, PackedValues):
        kinds |= {"KIND": "packed", "KEY_GROUP": keys.group, "VALUE_GROUP": values.group}
        tensors = [None, *keys.tensors(), *values.tensors(), None]
        return [*tensors, bias], kinds, values.scale.rows.shape[1] * values.group
    assert isinstance(keys, RotatedKeys) and isinstance(values, TokenValues)
    table = centroids(4 if keys.bits == 8 else keys.bits, torch.float32, query.device)
    tensors = [keys.asked(query).contiguous(), keys.codes.rows, keys.scales.rows, None]
    tensors += [values.codes.rows, values.scales.rows, None, table]
    return [*tensors, bias], kinds | {"KIND": "per token"}, values.size


def _of_rectangle(given: Rectangle | None) -> tuple[Any, ...]:
    """Tensors of the kernel for a rectangle, and the steps from a segment to the next."""
    if given is None:
        return None, None, 0, 0, 0, None, 0, None, 0
    keys, values = (_in_rows(part) for part in (given.keys, given.values))
    steps = (0 if part is None else part.stride(0) for part in (given.bias, given.visible))
    assert all(part is None or part.stride(1) == 1 for part in (given.bias, given.visible))
    of_bias, of_visible = steps
    beside = given.bias, of_bias, given.visible, of_visible
    return keys, values, keys.stride(0), values.stride(0), keys.shape[1], *beside


def _in_rows(part: Tensor) -> Tensor:
    """`part [R, T, D]` with each segment's numbers in one piece."""
    return part if part.stride()[1:] == (part.shape[2], 1) else part.contiguous()


@triton.jit
def _attend(
    query,
    asked,
    keys,
    key_scale,
    key_low,
    values,
    value_scale,
    value_low,
    table,
    bias,
    beside_keys,
    beside_values,
    beside_key_step,
    beside_value_step,
    beside_width,
    tail_keys,
    tail_values,
    tail_key_step,
    tail_value_step,
    tail_width,
    tail_bias,
    tail_bias_step,
    visible,
    visible_step,
    segments,
    part_of,
    key_starts,
    value_starts,
    lengths,
    gaps,
    parts,
    sums,
    part_size,
    scale,
    softcap,
    all_segments,
    groups,
    size,
    value_size,
    KIND: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    CAPPED: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DOT: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    segment = tl.load(segments + item).to(tl.int64)
    # The part's entries, counted from the segment's first; then from the first of each rectangle.
    begin = tl.load(part_of + item) * part_size
    end = begin + part_size
    head, column = tl.arange(0, G), tl.arange(0, D)
    mine = (head < groups)[:, None] & (column < size)[None, :]
    at = (segment * groups + head)[:, None] * size + column[None, :]
    q = tl.load(query + at, mine, 0.0).to(DOT)
    most = tl.full([G], float("-inf"), tl.float32)
    total = tl.zeros([G], tl.float32)
    mixed = tl.zeros([G, DV], tl.float32)
    length = tl.load(lengths + segment)
    last = tl.minimum(end, length)
    if KIND != "none":
        key_start, value_start = tl.load(key_starts + segment), tl.load(value_starts + segment)
    if bias is not None:
        bias += key_start
    if KIND == "raw":
        most, total, mixed = _add_rows(
            q, keys + key_start * size, values + value_start * value_size, bias, None, begin, last,
            scale, softcap, most, total, mixed, size, value_size, CAPPED, N, D, DV, DOT,
        )  # fmt: skip
    elif KIND != "none":
        asks = q
        if asked is not None:
            asks = tl.load(asked + at, mine, 0.0).to(DOT)
        for first in range(begin, last, N):
            row = first + tl.arange(0, N)
            seen = row < last
            of_keys, of_values = key_start + row, value_start + row
            if KIND == "packed":
                k = packed_keys(
                    keys, key_scale, key_low, key_start + first, last - first, size,
                    KEY_BITS, KEY_GROUP, N, D,
                )  # fmt: skip
                v = packed_values(
                    values, value_scale, value_low, of_values, seen, value_size,
                    VALUE_BITS, VALUE_GROUP, N, DV,
                )  # fmt: skip
                products = tl.dot(asks, tl.trans(k.to(DOT)), input_precision="ieee")
            else:
                k = rotated_keys(keys, table, of_keys, seen, size, KEY_BITS, D)
                v = token_values(values, value_scale, of_values, seen, value_size, VALUE_BITS, DV)
                products = tl.dot(asks, tl.trans(k.to(DOT)), input_precision="ieee")
                products *= tl.load(key_scale + of_keys, seen, 0.0).to(tl.float32)[None, :]
            logits = logits_of(products, scale, softcap, CAPPED)
            if bias is not None:
                logits += tl.load(bias + row, seen, 0.0)[None, :] * LOG2_E
            logits = tl.where(seen[None, :], logits, float("-inf"))
            most, total, mixed = add_block(logits, v, most, total, mixed, DOT)
    begin, end = begin - length, end - length
    if beside_keys is not None:
        gap = tl.load(gaps + segment)
        most, total, mixed = _add_rows(
            q, beside_keys + segment * beside_key_step, beside_values + segment * beside_value_step,
            None, None, gap + tl.maximum(begin, 0), tl.minimum(gap + end, beside_width),
            scale, softcap, most, total, mixed, size, value_size, CAPPED, N, D, DV, DOT,
        )  # fmt: skip
        begin, end = begin - (beside_width - gap), end - (beside_width - gap)
    if tail_keys is not None:
        gap = tl.load(gaps + all_segments + segment)
        if tail_bias is not None:
            tail_bias += segment * tail_bias_step
        if visible is not None:
            visible += segment * visible_step
        most, total, mixed = _add_rows(
            q, tail_keys + segment * tail_key_step, tail_values + segment * tail_value_step,
            tail_bias, visible, gap + tl.maximum(begin, 0), tl.minimum(gap + end, tail_width),
            scale, softcap, most, total, mixed, size, value_size, CAPPED, N, D, DV, DOT,
        )  # fmt: skip
    store_part(mixed, most, total, parts, sums, item, groups, value_size, G, DV)


@triton.jit
def _add_rows(
    q, keys, values, bias, visible, begin, end,
    scale, softcap, most, total, mixed, size, value_size,
    CAPPED: tl.constexpr, N: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Running softmax state after the raw entries from row `begin` to `end − 1`."""
    column, value_column = tl.arange(0, D)[None, :], tl.arange(0, DV)[None, :]
    for first in range(begin, end, N):
        row = first + tl.arange(0, N)
        seen = row < end
        if visible is not None:
            seen = seen & (tl.load(visible + row, seen, 0) != 0)
        at = row.to(tl.int64)[:, None]
        inside = seen[:, None] & (column < size)
        k = tl.load(keys + at * size + column, inside, 0.0)
        inside = seen[:, None] & (value_column < value_size)
        v = tl.load(values + at * value_size + value_column, inside, 0.0)
        products = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee")
        logits = logits_of(products, scale, softcap, CAPPED)
        if bias is not None:
            logits += tl.load(bias + row, seen, 0.0)[None, :] * LOG2_E
        logits = tl.where(seen[None, :], logits, float("-inf"))
        most, total, mixed = add_block(logits, v, most, total, mixed, DOT)
    return most, total, mixed
