# SPDX-License-Identifier: Apache-2.0
"""Time per token and bytes over a long generation: `python benchmarks/long_decode.py`.

A tiny model and methods that hold a budget of 256 entries; medians of each tenth of the tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.bench.models import BenchModel

METHODS = ("streaming_llm", "tova", "h2o", "d2o")
BUDGET, PROMPT, PARTS = 256, 512, 10


@torch.no_grad()
def decode(model: PreTrainedModel, method: str, tokens: int) -> list[tuple[float, int]]:
    """Median milliseconds per token, and cache bytes, of each part of the generation."""
    cache = kvfold.CompressedCache(model, method, BUDGET)
    ids = torch.randint(0, model.config.vocab_size, (1, PROMPT))
    token = model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
    parts = []
    for _ in range(PARTS):
        times = []
        for _ in range(tokens // PARTS):
            began = time.perf_counter()
            token = model(token, past_key_values=cache).logits.argmax(-1)
            times.append(1000 * (time.perf_counter() - began))
        parts.append((statistics.median(times), cache.stats().nbytes))
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = BenchModel.of("tiny", "float32", 0).model
    for method in arguments.methods:
        parts = decode(model, method, arguments.tokens)
        first, last = parts[0][0], parts[-1][0]
        print(
            f"{method:15s} ms per token {' '.join(f'{ms:.2f}' for ms, _ in parts)}; last tenth "
            f"{last / first:.2f} x the first; bytes {min(b for _, b in parts)} to "
            f"{max(b for _, b in parts)}"
        )


if __name__ == "__main__":
    main()
