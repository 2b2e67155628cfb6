# SPDX-License-Identifier: Apache-2.0
"""Attention with column sums against packed SDPA alone: `python benchmarks/column_sums.py`.

Interleaved in one run, one thread; the peak is the growth of the process at each length.
"""

from __future__ import annotations

import resource
import statistics
import time

import torch
import torch.nn.functional as F

from kvfold.kernels.query_blocks import attend_with_moments

HEADS, GROUPS, SIZE, ROUNDS = 4, 2, 64, 5


def main() -> None:
    torch.set_num_threads(1)
    for length in (2048, 4096, 8192):
        query = torch.randn(1, HEADS * GROUPS, length, SIZE)
        key, value = torch.randn(2, 1, HEADS, length, SIZE)
        packed, summed = [], []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            wide = key.repeat_interleave(GROUPS, 1), value.repeat_interleave(GROUPS, 1)
            F.scaled_dot_product_attention(query, *wide, is_causal=True)
            packed.append(time.perf_counter() - began)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            began = time.perf_counter()
            attend_with_moments(query, key, value, None, squares=False, scale=SIZE**-0.5)
            summed.append(time.perf_counter() - began)
            if len(summed) == 1:
                grew = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        ratios = [b / a for a, b in zip(packed, summed, strict=True)]
        print(
            f"n={length}: {statistics.median(ratios):.2f} x packed SDPA "
            f"({min(ratios):.2f} to {max(ratios):.2f}), peak grew by {grew / 1024:.0f} MB"
        )


if __name__ == "__main__":
    main()
