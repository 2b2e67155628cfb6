# SPDX-License-Identifier: Apache-2.0
"""Memory that a context of recall takes while it answers from its file, beside holding its entries.

    python benchmarks/recall_on_disk.py [--tokens 65536] [--steps 256] [--folder FOLDER]

Entries are random, of the shape "small" of `kvfold bench`. The answer is in a process of its own;
anonymous memory is read from the kernel, less that before the context is loaded. Linux only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import kvfold
from kvfold.bench.models import BenchModel
from kvfold.cache.evict import encode_all
from kvfold.cache.observe import observation_of_stored
from kvfold.contexts.context import Context


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class Watch(threading.Thread):
    """The most anonymous memory until `done`, looked at every 2 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.done = 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.002):
            self.most = max(self.most, anonymous_bytes())


@torch.no_grad()
def make(path: Path, tokens: int) -> None:
    """Writes a context of so many tokens, whose entries no forward has made."""
    subject = BenchModel.of("small", None, seed=0, device="cpu")
    frame = kvfold.compress(subject.model, subject.tokenizer, "a few words", "recall").frame
    cache = kvfold.CompressedCache(subject.model, "recall")
    shape, generator = subject.shape, torch.Generator().manual_seed(0)
    for layer in cache.compressed_layers:
        size = 1, shape.kv_heads, tokens, shape.head_size
        layer.update(*(torch.randn(size, generator=generator) for _ in range(2)))
        encode_all(layer.state, observation_of_stored(layer.state))
        layer.state.settle()
    ids = subject.tokens(1, tokens)
    cache.phase.note_ids(ids)
    Context(subject.model, subject.tokenizer, cache, frame, ids, None).save(path)


@torch.no_grad()
def answer(path: Path, steps: int) -> None:
    """Answers from the context, and prints what that took."""
    subject = BenchModel.of("small", None, seed=0, device="cpu")
    subject.model(subject.tokens(1, 64))
    before = anonymous_bytes()
    watch = Watch()
    watch.start()
    context = kvfold.load(path, subject.model, subject.tokenizer)
    chat, start = context.chat(), time.perf_counter()
    chat.ask("What is said?", max_new_tokens=steps, min_new_tokens=steps)
    seconds = time.perf_counter() - start
    watch.done.set()
    stats, took = chat.stats(), watch.most - before
    print(f"{stats}\n{seconds / steps * 1e3:.1f} ms a step, the first reading included")
    print(f"anonymous memory {took:,} bytes, {took / stats.nbytes_full:.3f} of the full cache's")


def main() -> None:
    """Makes a context and answers from it, each in a process."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tokens", type=int, default=65536)
    arguments.add_argument("--steps", type=int, default=256)
    arguments.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments.add_argument("--part", choices=("make", "answer"))
    given = arguments.parse_args()
    torch.set_num_threads(1)
    path = given.folder / "recall_on_disk.kvfold"
    if given.part == "make":
        make(path, given.tokens)
    elif given.part == "answer":
        answer(path, given.steps)
    else:
        for part in ("make", "answer"):
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--part", part], check=True)
        path.unlink()


if __name__ == "__main__":
    main()
