# SPDX-License-Identifier: Apache-2.0
"""Time per token and bytes over a long generation: `python benchmarks/long_decode.py`.

A tiny model and methods that hold a budget of 256 entries; medians of each tenth of the tokens.
With `--rounds`, methods that evict after every 128 of 4096 generated tokens, at 1024 entries,
against a full cache and one that appends: mean processor time per token, rounds included, and the
largest cache. All take turns at every token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.bench.models import BenchModel

METHODS = ("streaming_llm", "tova", "h2o", "d2o")
BUDGET, PROMPT, PARTS = 256, 512, 10
IN_ROUNDS = (
    "knorm + every", "keydiff + every", "rkv", "snapkv_decode", "triattention:prompt=counted",
)  # fmt: skip
ROUNDS_BUDGET, INTERVAL = 1024, 128
FULL, APPEND = "full", "knorm"


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


@torch.no_grad()
def in_rounds(model: PreTrainedModel, tokens: int) -> None:
    """Prints the means of `tokens` generated tokens after a prompt as long as the budget."""
    names = (FULL, APPEND, *IN_ROUNDS)
    caches = {
        name: kvfold.CompressedCache(model, name, None if name == FULL else ROUNDS_BUDGET)
        for name in names
    }
    ids = torch.randint(0, model.config.vocab_size, (1, ROUNDS_BUDGET + tokens))
    for cache in caches.values():
        model(ids[:, :ROUNDS_BUDGET], past_key_values=cache, logits_to_keep=1)
    entry = caches[FULL].stats().nbytes / ROUNDS_BUDGET
    seconds, largest = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    order = random.Random(0)
    for step, token in enumerate(ids[:, ROUNDS_BUDGET:].split(1, 1), 1):
        for name in order.sample(names, len(names)):
            began = time.process_time()
            model(token, past_key_values=caches[name])
            seconds[name] += time.process_time() - began
            if (step + 1) % INTERVAL == 0:  # the token before a round
                largest[name] = max(largest[name], caches[name].stats().nbytes)
    for name in names:
        print(
            f"{name:28s} {1000 * seconds[name] / tokens:.3f} ms per token, "
            f"{seconds[name] / seconds[FULL]:.3f} x {FULL}, "
            f"{seconds[name] / seconds[APPEND]:.3f} x {APPEND}; largest cache "
            f"{largest[name] / entry / (ROUNDS_BUDGET + INTERVAL):.3f} x {ROUNDS_BUDGET} + "
            f"{INTERVAL} entries"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--rounds", action="store_true", help="methods that evict in rounds")
    parser.add_argument("--model", default=None, help="tiny, or small with --rounds")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = arguments.model or ("small" if arguments.rounds else "tiny")
    model = BenchModel.of(shape, "float32", 0, "cpu").model
    if arguments.rounds:
        return in_rounds(model, arguments.tokens or 4096)
    for method in arguments.methods:
        parts = decode(model, method, arguments.tokens or 20_000)
        first, last = parts[0][0], parts[-1][0]
        print(
            f"{method:15s} ms per token {' '.join(f'{ms:.2f}' for ms, _ in parts)}; last tenth "
            f"{last / first:.2f} x the first; bytes {min(b for _, b in parts)} to "
            f"{max(b for _, b in parts)}"
        )


if __name__ == "__main__":
    main()
