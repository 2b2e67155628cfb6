# SPDX-License-Identifier: Apache-2.0
"""Time of a decode step on a GPU, by method and batch:

    python benchmarks/gpu_decode.py --out FILE.jsonl [--model llama-3-8b] [--length 32768]

One prompt is read and compressed, and its row repeated: rows of equal length, without padding. The
batches are 1, 8, 24, 120, …, the last within a share of the GPU's memory. Each takes three steps to
warm up and ten that are timed together, eagerly, with SDPA attention. "transformers" is the
DynamicCache of transformers. Prints a line for each batch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvfold
from kvfold.bench.models import BenchModel
from kvfold.measure.clock import synchronize
from kvfold.measure.machine import MachineSetup, commit

STOCK = "transformers"
METHODS = (
    STOCK, "full", "snapkv", "adakv", "h2o", "d2o", "kivi:bits=4", "snapkv + kivi:bits=4",
    "turboquant",
)  # fmt: skip
BUDGET = 0.2
TIMES = (8, 3, 5, 2, 2)  # a batch is so many times the one before
WARM, STEPS = 3, 10
SHARE = 0.85  # of the GPU's memory that weights and caches may take


@torch.no_grad()
def filled_cache(measured: BenchModel, method: str, ids: Tensor) -> Any:
    """A cache that has read `ids [1, N]` and is compressed."""
    model = measured.model
    if method == STOCK:
        cache: Any = DynamicCache(config=model.config)
        model(ids, past_key_values=cache, logits_to_keep=1)
        return cache
    budget = BUDGET if kvfold.parse(method).takes_budget else None
    cache = kvfold.CompressedCache(model, method, budget, tokenizer=measured.tokenizer)
    kvfold.generate(
        model,
        ids,
        cache=cache,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,
        do_sample=False,
    )
    return cache


@torch.no_grad()
def step_seconds(model: PreTrainedModel, cache: Any, batch: int) -> float:
    """Mean seconds of a step of `batch` rows."""
    token = torch.full((batch, 1), 7, device=model.device)
    for done in range(WARM + STEPS):
        if done == WARM:
            synchronize(model.device)
            began = time.perf_counter()
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
    synchronize(model.device)
    return (time.perf_counter() - began) / STEPS


def measure(measured: BenchModel, method: str, length: int) -> Iterator[dict[str, Any]]:
    """A row for each batch of one method."""
    model = measured.model
    ids = measured.tokens(1, length).to(model.device)
    filled_cache(measured, method, ids[:, : min(512, length // 2)])
    synchronize(model.device)
    before, began, batch = torch.cuda.memory_allocated(), time.perf_counter(), 1
    cache = filled_cache(measured, method, ids)
    synchronize(model.device)
    first = time.perf_counter() - began
    of_row = torch.cuda.memory_allocated() - before
    room = SHARE * torch.cuda.get_device_properties(0).total_memory - before
    for times in (1, *TIMES):
        if times > 1:
            if of_row * batch * times > room:
                times = int(room / of_row / batch)
            if times < 2:
                return
            cache.batch_repeat_interleave(times)
            batch *= times
        step = step_seconds(model, cache, batch)
        yield {
            "model": measured.source.name,
            "dtype": measured.source.dtype,
            "length": length,
            "method": method,
            "batch": batch,
            "reading_seconds": first,
            "step_milliseconds": 1000 * step,
            "tokens_per_second": batch / step,
            "row_bytes": of_row,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU that torch sees")
    measured = BenchModel.of(given.model, None, 0)
    about = {"setup": MachineSetup.here().model_dump(), "commit": commit()}
    for method in given.methods:
        try:
            for row in measure(measured, method, given.length):
                if given.out:
                    with given.out.open("a") as file:
                        file.write(json.dumps(row | about) + "\n")
                print(
                    f"{method:24} read in {row['reading_seconds']:.2f} s, "
                    f"{row['row_bytes'] / 1e9:.2f} GB a row; {row['batch']} rows: "
                    f"{row['step_milliseconds']:.1f} ms, {row['tokens_per_second']:.0f} tokens/s",
                    flush=True,
                )
        except torch.OutOfMemoryError as problem:
            print(f"{method:24} out of memory: {problem}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
