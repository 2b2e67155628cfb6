# SPDX-License-Identifier: Apache-2.0
"""One decode step's attention to heads of skewed lengths, beside the full cache with packed heads.

`python benchmarks/segments.py`: interleaved; medians of ratios.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.nn.functional as F

from kvfold.kernels.ragged import attend_to_segments
from kvfold.measure.clock import seconds
from kvfold.store.encoding import Encode
from kvfold.store.ragged import RaggedStore

HEADS, GROUPS, SIZE = 8, 4, 128
KEPT = 0.25
TAIL = 1


def skewed(length: int) -> list[int]:
    """Number of entries of each head: from a twelfth of the mean to nearly three times the mean."""
    shares = torch.logspace(-1.5, 1.5, HEADS, base=3.0)
    counts = (shares / shares.sum() * KEPT * length * HEADS).long().clamp(max=length)
    return counts.tolist()


@torch.no_grad()
def compare(length: int, repeats: int) -> tuple[float, float, float]:
    """Median and quartiles of the ratio of times."""
    query = torch.randn(1, HEADS * GROUPS, 1, SIZE)
    key, value = torch.randn(2, 1, HEADS, length, SIZE)
    slots = torch.full((1, HEADS, max(skewed(length))), -1)
    for head, count in enumerate(skewed(length)):
        slots[0, head, slots.shape[-1] - count :] = torch.arange(count)
    positions = torch.arange(length).expand(1, HEADS, length)
    store = RaggedStore(key, value, positions, slots, Encode())
    store.encode_due(decoding=False)
    new_keys, new_values = torch.randn(2, 1, HEADS, TAIL, SIZE)
    store.append(new_keys, new_values, first=length)
    stored = store.view()
    assert stored is not None
    packed = query.view(1, HEADS, GROUPS, SIZE)

    def full() -> None:
        F.scaled_dot_product_attention(packed, key, value)

    def ragged() -> None:
        attend_to_segments(query, stored, None, scale=SIZE**-0.5)

    ratios = []
    for _ in range(repeats):
        base = seconds(query.device, full)
        ratios.append(seconds(query.device, ragged) / base)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for length in (4096, 8192, 16384):
        middle, low, high = compare(length, arguments.repeats)
        print(f"{length:6d} tokens, kept {KEPT}: {middle:.2f} x ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
