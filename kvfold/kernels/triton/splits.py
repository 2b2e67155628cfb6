# SPDX-License-Identifier: Apache-2.0
"""Split-K of a decode kernel: segments cut into parts, one per program, and their merge.

A program goes through its part by an online softmax in base 2, one block of logits at a time.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Entries that a program reads at a time
BLOCK = 64
# Programs of a launch: about four per multiprocessor of a large GPU; a part has two blocks or more.
PROGRAMS = 512
# Largest row, in bytes, that is read BLOCK entries at a time
NARROW = 256
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


def dot_dtype(like: torch.Tensor) -> tl.dtype:
    """Operand dtype of `tl.dot`: the tensor's own; float32 in the interpreter (no bfloat16)."""
    half = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return half.get(like.dtype, tl.float32) if like.is_cuda else tl.float32


@triton.jit
def logits_of(products, scale, softcap, CAPPED: tl.constexpr):
    """Logits in base 2: scaled, and capped at `softcap` if CAPPED."""
    logits = products * scale
    if CAPPED:
        # softcap · tanh(logits / softcap)
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    return logits * LOG2_E


@triton.jit
def add_block(logits, values, most, total, mixed, DOT: tl.constexpr):
    """Running softmax state after one more block of logits `[G, N]` and values `[N, Dv]`.

    State: highest logit `[G]`, sum of weights `[G]`, weighted values `[G, Dv]`. No row of logits
    may be all −inf.
    """
    highest = tl.maximum(most, tl.max(logits, 1))
    fade = tl.exp2(most - highest)
    weights = tl.exp2(logits - highest[:, None])
    total = total * fade + tl.sum(weights, 1)
    product = tl.dot(weights.to(DOT), values.to(DOT), input_precision="ieee")
    return highest, total, mixed * fade[:, None] + product


@triton.jit
def store_part(
    mixed, most, total, parts, sums, row, groups, size, G: tl.constexpr, SIZE: tl.constexpr
):
    """Writes a part's output `[G, Dv]` and log-sum-exp `[G]` at `row`; 0 and −inf if empty."""
    head, column = tl.arange(0, G), tl.arange(0, SIZE)
    at = row * groups + head
    seen = total > 0
    whole = tl.where(seen, total, 1.0)
    inside = (head < groups)[:, None] & (column < size)[None, :]
    tl.store(parts + at[:, None] * size + column[None, :], mixed / whole[:, None], inside)
    lse = tl.where(seen, (most + tl.log2(whole)) * LN_2, float("-inf"))
    tl.store(sums + at, lse, head < groups)


def launch_options(row_bytes: int) -> dict[str, int]:
    """Block size and pipeline stages of a decode kernel, for rows of `row_bytes`.

    Up to `dispatch.LARGEST`, 99 KB of shared memory suffice (compute capability 8.6 and 8.9).
    """
    wide = row_bytes > NARROW
    return {"N": BLOCK // 2, "num_stages": 2} if wide else {"N": BLOCK, "num_stages": 3}


@dataclass(frozen=True)
class Splits:
    """Parts of R segments, of `size` entries each; item i is part `part[i]` of `segment[i]`.

    Segment s has the items from `first[s]` to `first[s + 1] − 1`; first `[R + 1]`, all int32.
    Entries beyond a segment's end add nothing, so splits made for a buffer's capacity serve until
    it is full.
    """

    segment: Tensor
    part: Tensor
    first: Tensor
    size: int

    @classmethod
    def of(
        cls, lengths: list[int], size: int | None = None, device: torch.device | str | None = None
    ) -> Splits:
        """Parts of `size` entries, a multiple of BLOCK, that cover segments of these lengths."""
        if size is None:
            size = max(2 * BLOCK, BLOCK * -(-sum(lengths) // (PROGRAMS * BLOCK)))
        assert size % BLOCK == 0
        counts = torch.tensor([-(-length // size) for length in lengths])
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        segment = torch.arange(len(lengths)).repeat_interleave(counts)
        part = torch.arange(len(segment)) - first[segment]
        segment, part, first = (each.int().to(device) for each in (segment, part, first))
        return cls(segment, part, first, size)

    def room(self, groups: int, size: int) -> tuple[Tensor, Tensor]:
        """Uninitialized buffers for parts: outputs `[items, G, Dv]`, log-sum-exps `[items, G]`."""
        items, device = len(self.segment), self.segment.device
        parts = torch.empty(items, groups, size, dtype=torch.float32, device=device)
        return parts, torch.empty(items, groups, dtype=torch.float32, device=device)

    def merged(self, parts: Tensor, sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Outputs `[R, G, Dv]` and log-sum-exps `[R, G]` of segments, from `room`'s buffers."""
        segments, (_, groups, size) = len(self.first) - 1, parts.shape
        out = parts.new_empty(segments, groups, size, dtype=dtype)
        lse = parts.new_empty(segments, groups)
        wide = triton.next_power_of_2(size)
        _merge[(segments, groups)](
            parts, sums, self.first, out, lse, groups, size, ITEMS=16, SIZE=wide
        )
        return out, lse


@triton.jit
def _merge(parts, sums, first, out, lse, groups, size, ITEMS: tl.constexpr, SIZE: tl.constexpr):
    segment, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, SIZE)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([SIZE], tl.float32)
    end = tl.load(first + segment + 1)
    for at in range(tl.load(first + segment), end, ITEMS):
        item = (at + tl.arange(0, ITEMS)).to(tl.int64)
        row = item * groups + head
        part_sum = tl.load(sums + row, item < end, float("-inf")) * LOG2_E
        inside = (item < end)[:, None] & (column < size)[None, :]
        part = tl.load(parts + row[:, None] * size + column[None, :], inside, 0.0)
        highest = tl.maximum(most, tl.max(part_sum, 0))
        # Empty parts have no highest logit to subtract.
        level = tl.where(highest == float("-inf"), 0.0, highest)
        fade, weights = tl.exp2(most - level), tl.exp2(part_sum - level)
        total = total * fade + tl.sum(weights, 0)
        mixed = mixed * fade + tl.sum(weights[:, None] * part, 0)
        most = highest
    whole = tl.where(total > 0, total, 1.0)
    at = segment * groups + head
    tl.store(out + at * size + column, mixed / whole, column < size)
    tl.store(lse + at + tl.arange(0, 1), (most + tl.log2(whole)) * LN_2)
