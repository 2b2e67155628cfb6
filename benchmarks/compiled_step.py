# SPDX-License-Identifier: Apache-2.0
"""A decode step of one compiled graph beside the eager one.

`python benchmarks/compiled_step.py`: a model of `kvfold bench`, kept 0.2, tokens of `generate`, one
run after the other in each round; medians of rounds, over those of the eager full cache of `kvfold
bench`. Each cache reads the prompt once, and runs go on from copies of it. The row "full" is
kvfold's own method.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kvfold
from kvfold.bench.baseline import full_cache, full_twin
from kvfold.bench.models import BenchModel
from kvfold.bench.sdpa_variants import fastest

NEW, WARM_UP = 48, 6
METHODS = ["full", "snapkv", "knorm", "tova", "h2o", "d2o", "roco"]


class Clock:
    """Streamer that records the time of each token."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, _: Tensor) -> None:
        """Called by `generate` with the prompt, then with each token."""
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        """Called by `generate` at the end."""

    def per_token(self) -> float:
        """Median milliseconds per token."""
        steps = zip(self.stamps[WARM_UP:], self.stamps[WARM_UP + 1 :], strict=False)
        return 1000 * statistics.median(after - before for before, after in steps)


def timed(generate: Callable[..., object], **options: Any) -> float:
    """Milliseconds per token of a run."""
    clock = Clock()
    generate(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, streamer=clock, **options)
    return clock.per_token()


def compare(subject: BenchModel, length: int, methods: list[str], rounds: int) -> None:
    """Prints a row for each method."""
    model, ids = subject.model, subject.tokens(1, length)
    kernels = fastest(model, 1, length)
    baseline: Any = full_twin(model, kernels)

    whole_cache = full_cache(baseline, NEW + 1)
    first: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False}
    with kernels.prefill.chosen():
        begun = baseline.generate(input_ids=ids, past_key_values=whole_cache, **first)
    read: dict[str, tuple[kvfold.CompressedCache, Tensor]] = {}
    for method in methods:
        budget = 0.2 if kvfold.parse(method).takes_budget else None
        cache = kvfold.CompressedCache(model, method, budget, tokenizer=subject.tokenizer)
        read[method] = cache, kvfold.generate(model, ids, cache=cache, **first)

    def full() -> float:
        with kernels.decode.chosen():
            cache = copy.deepcopy(whole_cache)
            return timed(baseline.generate, input_ids=begun, past_key_values=cache)

    def of(method: str, compiled: bool) -> float:
        cache, text = copy.deepcopy(read[method][0]), read[method][1]
        options = {"model": model, "input_ids": text, "cache": cache, "compile": compiled}
        return timed(kvfold.generate, **options)

    for method in methods:
        of(method, True)  # compiles
    taken: dict[tuple[str, bool], list[float]] = {}
    wholes: list[float] = []
    for _ in range(rounds):
        whole = full()
        wholes.append(whole)
        for method in methods:
            for compiled in (False, True):
                taken.setdefault((method, compiled), []).append(of(method, compiled) / whole)
    print(f"{length} tokens, x full ({kernels.decode}, {statistics.median(wholes):.2f} ms)")
    print(f"{'method':24}{'eager':>8}{'compiled':>10}")
    for method in methods:
        eager, fast = (statistics.median(taken[method, how]) for how in (False, True))
        print(f"{method:24}{eager:8.2f}{fast:10.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    subject = BenchModel.of(arguments.model, None, 0, arguments.device)
    for length in arguments.lengths:
        compare(subject, length, arguments.methods, arguments.rounds)


if __name__ == "__main__":
    main()
