# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one LMCache edit, and the tensors that it is given.

`python benchmarks/lmcache_edit.py`: random bfloat16 tensors of a 1.7 B-model shape, 28 layers, 16
query heads, 8 KV heads of size 128, each method in a process of its own. Every edit is compared
with the entries at its tokens, their keys rotated in float64.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvfold.fitted.file import CHECKSUM, FORMAT, HEADER, VERSION, ScorerHeader
from kvfold.hf.header import ModelHeader, RopeHeader, digest, digest_of
from kvfold.measure.peak import ALLOCATOR, RESET, memory
from kvfold.policies import Rope
from kvfold.policies.lmcache import LMCacheEdit

LAYERS, QUERY_HEADS, HEADS, SIZE = 28, 16, 8, 128
METHODS = ["snapkv", "rkv", "keydiff", "expected_attention", "zap"]
ROPE = Rope.plain(SIZE, 1e6)
PROJECTIONS = 64


def scorer(folder: str) -> str:
    """The text of zap with random weights, in a file as `kvfold fit` writes it."""
    path, features = Path(folder) / "scorer.safetensors", 2 * SIZE + 3
    tensors = {
        "weights": torch.randn(LAYERS, HEADS, features + PROJECTIONS),
        "scales": torch.ones(LAYERS, HEADS, features),
        "projections": torch.randn(features, PROJECTIONS) / features**0.5,
    }
    header = ScorerHeader(
        written_by="",
        target="kvzip",
        texts=0,
        dtype="bfloat16",
        model=ModelHeader(name="", config={}, config_hash="", weights="", vocabulary=""),
        rope=RopeHeader(parameters={}, scaling={}, moved=0),
        checksums={name: digest_of(tensor) for name, tensor in tensors.items()},
    ).model_dump_json()
    save_file(tensors, path, {FORMAT: VERSION, HEADER: header, CHECKSUM: digest(VERSION + header)})
    return f"zap:file={path}"


def tensors_of(tokens: int, queries: bool) -> dict[str, Tensor]:
    """Random KV `[2, L, T, H·D]`, and queries `[1, L, T, Hq·D]`, as LMCache gives them."""
    draw = torch.Generator().manual_seed(0)
    made = {"kv": torch.empty(2, LAYERS, tokens, HEADS * SIZE, dtype=torch.bfloat16)}
    if queries:
        made["query"] = torch.empty(1, LAYERS, tokens, QUERY_HEADS * SIZE, dtype=torch.bfloat16)
    for tensor in made.values():
        for layer in tensor.flatten(0, 1):
            layer.normal_(generator=draw)
    return made


def is_right(given: Tensor, kv: Tensor, slots: Tensor) -> bool:
    """True if `kv` holds the entries at `slots [K]`, keys at 0, 1, … but for rounding.

    Of a rotary pair's length, bfloat16 rounds 2^-8, and float32 angles up to 16384 take 2^-11.
    """
    shift = (torch.arange(len(slots)) - slots).double()[:, None, None] * ROPE.frequencies.double()
    cos, sin = shift.cos(), shift.sin()
    for layer in range(LAYERS):
        first, second = _pairs(given[0, layer, slots])
        turned = first * cos - second * sin, second * cos + first * sin
        length = torch.hypot(first, second)
        for found, expected in zip(_pairs(kv[0, layer]), turned, strict=True):
            if ((found - expected).abs() > (2**-8 + 2**-11) * length).any():
                return False
        if not torch.equal(kv[1, layer], given[1, layer, slots]):
            return False
    return True


def _pairs(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Both halves `[K, H, D / 2]` of keys `[K, H·D]`, float64."""
    first, second = keys.unflatten(1, (HEADS, SIZE)).double().chunk(2, -1)
    return first, second


def edit(
    method: str, budget: float, tokens: int, threads: int
) -> tuple[float, list[float], int, bool]:
    """Seconds; GB of the input, the peak beyond it and the result; tokens; if it is right."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        made = LMCacheEdit(
            scorer(folder) if method == "zap" else method,
            budget,
            head_size=SIZE,
            rope=ROPE,
            on_report=lambda loss: None,
        )
        given = tensors_of(tokens, queries=made.policy.needs.queries != 0)
        made({name: tensor[..., :1024, :] for name, tensor in given.items()}, range(1024))
        RESET.write_text("5")
        before, start = memory("VmRSS"), time.perf_counter()
        kv, ids = made(given, range(tokens))
        seconds = time.perf_counter() - start
        peak = memory("VmHWM") - before
    right = is_right(given["kv"], kv, torch.tensor(ids))
    sizes = sum(tensor.nbytes for tensor in given.values()), peak, kv.nbytes
    return seconds, [size / 1e9 for size in sizes], len(ids), right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    arguments = parser.parse_args()
    os.environ |= ALLOCATOR
    for method in arguments.methods:
        work = method, arguments.budget, arguments.tokens, arguments.threads
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            seconds, (given, peak, result), kept, right = process.submit(edit, *work).result()
        print(
            f"{method}: {kept} of {arguments.tokens} tokens, {'right' if right else 'WRONG'}, "
            f"{seconds:.0f} s, peak {peak:.2f} GB beyond the input, {result:.2f} GB of it the "
            f"result; {given:.2f} GB of input, {given + peak:.2f} GB in all",
            flush=True,
        )


if __name__ == "__main__":
    main()
