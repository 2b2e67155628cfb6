# SPDX-License-Identifier: Apache-2.0
"""One query's attention by two products, beside SDPA over the same packed heads.

`python benchmarks/single_query.py`: 4 KV heads of 64, float32. Between two calls the script reads
as many bytes as a layer's weights take. Interleaved; medians of ratios.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.bench.clock import seconds
from kvfold.kernels.single_query import attend_single

HEADS, SIZE = 4, 64
SETS = 4  # sets of keys and values, so that none is still in the processor's cache
WEIGHTS = 2**22  # numbers
CASES = [(1, 2, 820), (1, 2, 3277), (1, 2, 16384), (1, 4, 3277), (8, 2, 820)]


@torch.no_grad()
def compare(batch: int, groups: int, stored: int, repeats: int) -> list[float]:
    """Quartiles of the ratio of both times."""
    query = torch.randn(batch, HEADS * groups, 1, SIZE)
    packed = query.view(batch, HEADS, groups, SIZE)
    entries = torch.randn(SETS, 2, batch, HEADS, stored, SIZE)
    weights = torch.randn(WEIGHTS)

    def taken(work: Callable[[Tensor, Tensor], None], at: int) -> float:
        weights.sum()
        return seconds(query.device, partial(work, *entries[at % SETS]))

    def products(key: Tensor, value: Tensor) -> None:
        attend_single(query, key, value, SIZE**-0.5)

    def fused(key: Tensor, value: Tensor) -> None:
        F.scaled_dot_product_attention(packed, key, value)

    ratios = [taken(products, i) / taken(fused, i + 1) for i in range(repeats)]
    return statistics.quantiles(ratios, n=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for batch, groups, stored in CASES:
        low, middle, high = compare(batch, groups, stored, arguments.repeats)
        print(
            f"batch {batch}, {groups} queries per head, {stored} entries: "
            f"{middle:.2f} x SDPA ({low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    main()
