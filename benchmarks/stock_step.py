# SPDX-License-Identifier: Apache-2.0
"""A decode step beside that of transformers' own cache of the same size.

`python benchmarks/stock_step.py`: SnapKV keeps 0.2 of a prompt; the stock cache, which is copied at
every token, holds as many entries of a shorter prompt. Interleaved; medians of 45 steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from transformers import DynamicCache

import kvfold
from kvfold.bench.baseline import twin
from kvfold.bench.models import BenchModel
from kvfold.generation.generate import read_turn

STEPS, WARM_UP, REST = 50, 5, 0.005


@torch.no_grad()
def compare(subject: BenchModel, length: int) -> dict[str, float]:
    """Milliseconds per token of both caches after a prompt of `length` tokens."""
    model, stock = subject.model, twin(subject.model)
    ids = subject.tokens(1, length + STEPS)
    ours = kvfold.CompressedCache(model, "snapkv", 0.2)
    read_turn(model, ours, ids[:, :length], None, length, length)
    kept = int(max(max(row) for row in ours.stats().kept[0]))
    theirs = DynamicCache(config=stock.config)
    stock(ids[:, :kept], past_key_values=theirs, logits_to_keep=1)
    sides = {"kvfold": (model, ours), "stock": (stock, theirs)}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(STEPS):
        token = ids[:, length + step : length + step + 1]
        for name, (network, cache) in random.sample(list(sides.items()), 2):
            time.sleep(REST)
            began = time.perf_counter()
            network(token, past_key_values=cache, logits_to_keep=1)
            taken[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(times[WARM_UP:]) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    subject = BenchModel.of("small", "float32", 0, "cpu")
    for length in arguments.lengths:
        rounds = [compare(subject, length) for _ in range(arguments.rounds)]
        ratios = sorted(each["kvfold"] / each["stock"] for each in rounds)
        print(
            f"{length} tokens, kept 0.2: kvfold {ratios[len(ratios) // 2]:.2f} x stock "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
