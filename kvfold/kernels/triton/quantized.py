# SPDX-License-Identifier: Apache-2.0
"""Decode attention over quantized entries, which are dequantized in registers only.

Reference: plain attention over `PackedKeys.rows` and `PackedValues.rows`.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.kernels.triton.device import on_its_device
from kvfold.kernels.triton.ragged import ROWS
from kvfold.kernels.triton.splits import (
    Splits,
    add_block,
    dot_dtype,
    launch_options,
    logits_of,
    store_part,
)


@dataclass(frozen=True)
class BothPacked:
    """Extent of the entries whose key and value are both packed, in R segments.

    They are the first `lengths[i]` of segment i; its packed keys begin at entry `key_starts[i]`,
    its packed values at `value_starts[i]`. All `[R]`, int64.
    """

    key_starts: Tensor
    value_starts: Tensor
    lengths: Tensor
    splits: Splits

    @classmethod
    def of(cls, keys: Sequence[int], values: Sequence[int], device: torch.device) -> BothPacked:
        """From the number of packed keys and of packed values in each segment."""
        lengths = [min(both) for both in zip(keys, values, strict=True)]

        def starts(of_segments: Sequence[int]) -> Tensor:
            return torch.tensor([0, *accumulate(of_segments[:-1])], device=device)

        return cls(
            starts(keys),
            starts(values),
            torch.tensor(lengths, device=device),
            Splits.of(lengths, device=device),
        )


@on_its_device
def attend_to_packed(
    query: Tensor,
    keys: PackedKeys,
    values: PackedValues,
    scale: float,
    softcap: float | None = None,
    *,
    both: BothPacked | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention output `[R, G, Dv]` of `query [R, G, D]`, and log-sum-exp `[R, G]`, float32.

    Attends to the entries of R segments whose key and value are both packed; a segment without
    any gives 0 and −inf. The output has the query's dtype.
    """
    _, groups, size = query.shape
    if both is None:
        both = _extent(tuple(keys.lengths), tuple(values.lengths), query.device)
    value_words, value_groups = values.words.rows.shape[1], values.scale.rows.shape[1]
    value_size = value_groups * values.group
    parts, sums = both.splits.room(groups, value_size)
    if len(both.splits.segment):
        _attend[(len(both.splits.segment),)](
            query.contiguous(),
            keys.words.rows,
            keys.scale.rows,
            keys.minimum.rows,
            values.words.rows,
            values.scale.rows,
            values.minimum.rows,
            both.key_starts,
            both.value_starts,
            both.lengths,
            both.splits.segment,
            both.splits.part,
            parts,
            sums,
            both.splits.size,
            scale,
            softcap or 0.0,
            groups,
            size,
            value_size,
            CAPPED=softcap is not None,
            KEY_BITS=keys.bits,
            KEY_GROUP=keys.group,
            VALUE_BITS=values.bits,
            VALUE_GROUP=values.group,
            G=max(ROWS, triton.next_power_of_2(groups)),
            D=max(ROWS, triton.next_power_of_2(size)),
            VALUE_WORDS=triton.next_power_of_2(value_words),
            DOT=dot_dtype(query),
            **launch_options(max(size, value_size) * query.element_size()),
        )
    return both.splits.merged(parts, sums, query.dtype)


@lru_cache(maxsize=512)
def _extent(keys: tuple[int, ...], values: tuple[int, ...], device: torch.device) -> BothPacked:
    """Kept, as it costs copies to the device."""
    return BothPacked.of(keys, values, device)


@triton.jit
def _numbers(words, step, low, inside, shifts, BITS: tl.constexpr):
    """Dequantized numbers of `words`: its codes spread along the axis of `shifts`."""
    codes = (words >> shifts) & ((1 << BITS) - 1)
    lowest = tl.load(low, inside, 0.0)
    wide = codes.to(tl.float32) * tl.load(step, inside, 0.0).to(tl.float32)
    return (wide + lowest.to(tl.float32)).to(lowest.dtype)


@triton.jit
def _attend(
    query,
    key_words,
    key_scale,
    key_minimum,
    value_words,
    value_scale,
    value_minimum,
    key_starts,
    value_starts,
    lengths,
    segments,
    part_of,
    parts,
    sums,
    part_size,
    scale,
    softcap,
    groups,
    size,
    value_size,
    CAPPED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    DOT: tl.constexpr,
):
    KEYS: tl.constexpr = 32 // KEY_BITS
    VALUES: tl.constexpr = 32 // VALUE_BITS
    DV: tl.constexpr = VALUE_WORDS * VALUES
    item = tl.program_id(0).to(tl.int64)
    segment = tl.load(segments + item).to(tl.int64)
    key_start, value_start = tl.load(key_starts + segment), tl.load(value_starts + segment)
    begin = tl.load(part_of + item) * part_size
    end = tl.minimum(begin + part_size, tl.load(lengths + segment).to(tl.int32))
    head, column = tl.arange(0, G), tl.arange(0, D)
    asked = (head < groups)[:, None] & (column < size)[None, :]
    at = (segment * groups + head)[:, None] * size + column[None, :]
    q = tl.load(query + at, asked, 0.0).to(DOT)
    # Keys: words × numbers in a word × channels. Values: entries × words × numbers in a word.
    channel = column[None, None, :]
    key_shifts = (tl.arange(0, KEYS) * KEY_BITS)[None, :, None]
    word = tl.arange(0, VALUE_WORDS)[None, :, None]
    value_shifts = (tl.arange(0, VALUES) * VALUE_BITS)[None, None, :]
    row_words, row_groups = value_size // VALUES, value_size // VALUE_GROUP
    most = tl.full([G], float("-inf"), tl.float32)
    total = tl.zeros([G], tl.float32)
    mixed = tl.zeros([G, DV], tl.float32)
    for first in range(begin, end, N):
        entry = (first + tl.arange(0, N // KEYS) * KEYS)[:, None, None]
        inside = (entry < end) & (channel < size)
        words = tl.load(key_words + (key_start + entry) // KEYS * size + channel, inside, 0)
        of_group = (key_start + entry) // KEY_GROUP * size + channel
        low, step = key_minimum + of_group, key_scale + of_group
        k = _numbers(words, step, low, inside, key_shifts, KEY_BITS)
        k = tl.reshape(k, [N, D]).to(DOT)

        row = first + tl.arange(0, N)
        inside = (row < end)[:, None, None] & (word < row_words)
        entry = (value_start + row)[:, None, None]
        words = tl.load(value_words + entry * row_words + word, inside, 0)
        of_group = entry * row_groups + word * VALUES // VALUE_GROUP
        low, step = value_minimum + of_group, value_scale + of_group
        v = _numbers(words, step, low, inside, value_shifts, VALUE_BITS)
        v = tl.reshape(v, [N, DV])

        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = logits_of(products, scale, softcap, CAPPED)
        logits = tl.where((row < end)[None, :], logits, float("-inf"))
        most, total, mixed = add_block(logits, v, most, total, mixed, DOT)
    store_part(mixed, most, total, parts, sums, item, groups, value_size, G, DV)
