# SPDX-License-Identifier: Apache-2.0
"""kvpress as a peer: its counterparts of kvfold's methods, run in its own environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.bench.counterparts import press
from kvfold.bench.lineup import Makers
from kvfold.bench.machine import Setup
from kvfold.bench.participants import FULL, CacheSize, Label, Prefill
from kvfold.bench.peak import ALLOCATOR, WARM_UP, can_measure
from kvfold.bench.process import Process
from kvfold.bench.record import Cell
from kvfold.bench.shapes import BenchModel
from kvfold.bundled import FOLDER
from kvfold.errors import KvfoldError

EAGER = "ObservedAttentionPress"
# Float32 matrices of N × N per query head that eager attention holds: logits, softmax, its input.
MATRICES, FLOAT_BYTES = 3, 4


class Kvpress:
    """kvpress over the subject's weights, in a process run by `python`.

    Raises KvfoldError if kvpress is not installed there, or if that torch draws other random
    weights from the same seed.
    """

    name = "kvpress"

    def __init__(self, subject: BenchModel, python: Path) -> None:
        self.subject, self.python = subject, python
        self.process = self.start()
        hello = self.process.ask("hello")
        here = Setup.here()
        self.setup = here.model_copy(update=hello)
        self.heads = subject.shape.query_heads

    def start(self, environment: dict[str, str] | None = None) -> Process:
        """A new kvpress process that has built the same model; raises KvfoldError as the class."""
        source = self.subject.source
        process = Process(self.python, environment)
        process.ask("hello", threads=torch.get_num_threads())
        answer = process.ask(
            "build",
            config=source.config,
            path=source.path,
            tokenizer=source.path if source.config is None else str(FOLDER),
            dtype=source.dtype,
            seed=source.seed,
        )
        last = sorted(self.subject.model.named_parameters())[-1][1].detach()
        if last.flatten()[:8].double().tolist() != answer["check"]:
            process.close()
            raise KvfoldError(
                f"{self.python} makes other random weights from the same seed: install the same "
                f"version of torch there, {torch.__version__}"
            )
        return process

    def left_out(self, label: Label, cell: Cell) -> str | None:
        """Reason why kvpress cannot run `label` in a cell; None if it can, or does not own it."""
        spec = press(label, cell.length) if label.side == self.name else None
        if spec is None:
            return None
        if spec[0] == "KVzipPress" and cell.batch > 1:
            return "kvpress's KVzip takes one row only"
        need = MATRICES * cell.batch * self.heads * cell.length**2 * FLOAT_BYTES
        if spec[0] == EAGER and need > free_memory() / 2:
            return f"kvpress's eager attention takes about {need / 2**30:.0f} GiB for it"
        return None

    def close(self) -> None:
        """Ends the kvpress process."""
        self.process.close()

    def makers(self, wanted: Sequence[Label]) -> Makers:
        """Constructors of kvpress's full cache, and of its counterpart for each `wanted` label."""
        labels = [Label(self.name, FULL)]
        labels += [
            Label(self.name, label.method, label.budget)
            for label in wanted
            if press(label, 1) is not None
        ]
        return {label: partial(PressSide, self, label) for label in labels}


def free_memory() -> int:
    """Free bytes of the GPU, or of main memory without one."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class PressSide:
    """Participant that runs one press, or kvpress's full cache, in the process of `peer`."""

    def __init__(self, peer: Kvpress, label: Label) -> None:
        self.peer, self.label, self.key = peer, label, str(label)

    def prefill(self, ids: Tensor, room: int) -> Prefill:
        answer = self._prefill(self.peer.process, ids)
        return Prefill(answer["seconds"], answer["compression"], answer["peak"])

    def step(self, tokens: Tensor) -> float:
        answer = self.peer.process.ask("step", key=self.key, tokens=tokens.tolist())
        return float(answer["seconds"])

    def cache_size(self) -> CacheSize:
        answer = self.peer.process.ask("cache_size", key=self.key)
        return CacheSize(answer["nbytes"], answer["kept"])

    def free(self) -> None:
        self.peer.process.ask("free", key=self.key)

    def peak_alone(self, batch: int, length: int, room: int) -> int | None:
        if self.peer.subject.model.device.type != "cpu" or not can_measure():
            return None
        process = self.peer.start(ALLOCATOR)
        try:
            ids = self.peer.subject.tokens(batch, length)
            self._prefill(process, ids[:, :WARM_UP])
            process.ask("free", key=self.key)
            before = process.ask("mark")["bytes"]
            self._prefill(process, ids)
            return int(process.ask("peak")["bytes"]) - int(before)
        finally:
            process.close()

    def _prefill(self, process: Process, ids: Tensor) -> dict[str, Any]:
        spec = press(self.label, ids.shape[1])
        return process.ask("prefill", key=self.key, press=spec, ids=ids.tolist())
