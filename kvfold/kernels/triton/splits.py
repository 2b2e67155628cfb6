# SPDX-License-Identifier: Apache-2.0
"""Split-K of a decode kernel: segments cut into parts, one per program, and their merge."""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvfold.kernels.triton.softmax import LN_2, LOG2_E

# Entries that a program reads at a time
BLOCK = 64
# Programs of a launch: about four per multiprocessor of a large GPU; a part has two blocks or more.
PROGRAMS = 512
# Largest row, in bytes, that is read BLOCK entries at a time
NARROW = 256


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
