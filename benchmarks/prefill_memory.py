# SPDX-License-Identifier: Apache-2.0
"""Peak memory of whole prefill, chunked prefill, and compression after each chunk.

`python benchmarks/prefill_memory.py`: each in a process of its own, whose high-water mark is reset
after the model is loaded and warm.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

import kvfold
from kvfold.bench.models import BenchModel
from kvfold.measure.peak import ALLOCATOR, peak_during

WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in pieces": {"prefill_chunk": 1024},
    "per chunk": {"prefill_chunk": 1024, "compress": "per_chunk"},
}


def read(method: str, budget: float | int, length: int, way: str) -> tuple[int, int, int]:
    """The peak, and the cache's bytes after `length` tokens, with those of a full one."""
    torch.set_num_threads(2)
    subject = BenchModel.of("small", "float32", 0, "cpu")
    for tokens in (64, length):
        ids = subject.tokens(1, tokens)
        # The first, short prompt only warms up.
        cache = kvfold.CompressedCache(
            subject.model, method, min(budget, 32) if tokens == 64 else budget
        )
        options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, **WAYS[way]}
        peak = peak_during(partial(kvfold.generate, subject.model, ids, cache=cache, **options))
    return peak, cache.stats().nbytes, cache.stats().nbytes_full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--methods", nargs="+", default=["snapkv", "knorm", "h2o", "d2o"])
    arguments = parser.parse_args()
    os.environ |= ALLOCATOR
    for method in arguments.methods:
        for way in WAYS:
            work = method, arguments.budget, arguments.length, way
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                peak, held, full = process.submit(read, *work).result()
            print(
                f"{method:8s} {way:10s} peak {peak / 2**20:6.1f} MiB, cache {held / 2**20:5.1f} "
                f"of {full / 2**20:.1f} MiB"
            )


if __name__ == "__main__":
    main()
