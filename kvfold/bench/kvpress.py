# SPDX-License-Identifier: Apache-2.0
"""kvpress as a peer: its counterparts of kvfold's methods, run in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.bench.counterparts import press
from kvfold.bench.lineup import Makers
from kvfold.bench.models import BenchModel
from kvfold.bench.participants import FULL, CacheSize, ParticipantLabel, PrefillCost
from kvfold.bench.record import BenchCell
from kvfold.bundled import FOLDER
from kvfold.errors import KvfoldError
from kvfold.measure.machine import MachineSetup
from kvfold.measure.peak import ALLOCATOR, WARM_UP, can_measure

SCRIPT = Path(__file__).with_name("kvpress_server.py")
INSTALL = "-m pip install torch 'kvpress==0.5.5' 'transformers<5.3'"


class KvpressClient:
    """A running kvpress process, started with `environment` added to this process's.

    Raises KvfoldError if `python` cannot be run.
    """

    def __init__(self, python: Path, environment: dict[str, str] | None = None) -> None:
        self.python = python
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (open while it runs)
        # Isolated (-I): otherwise files of this folder would shadow modules such as "kernels".
        try:
            self._process = subprocess.Popen(
                [str(python), "-I", str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | (environment or {}),
                text=True,
            )
        except OSError as problem:
            raise KvfoldError(f"cannot run {python}: {problem}") from problem

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to the request `do`; raises KvfoldError if it fails or the process died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise KvfoldError(self._reason())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise KvfoldError(f"kvpress failed: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def _reason(self) -> str:
        """Why the process ended, from the last line of its standard error."""
        self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["it was killed"])[-1]
        if "ModuleNotFoundError" in last or "ImportError" in last:
            return f"{self.python} cannot import kvpress ({last}): run {self.python} {INSTALL}"
        return f"the kvpress process ended: {last}"


EAGER = "ObservedAttentionPress"
# Float32 matrices of N × N per query head that eager attention holds: logits, softmax, its input.
MATRICES, FLOAT_BYTES = 3, 4


class KvpressPeer:
    """kvpress over the subject's weights, in a process run by `python`.

    Raises KvfoldError if kvpress is not installed there, or if that torch draws other random
    weights from the same seed.
    """

    name = "kvpress"

    def __init__(self, subject: BenchModel, python: Path) -> None:
        self.subject, self.python = subject, python
        self.client = self.start()
        self.setup = MachineSetup.here().model_copy(update=self.client.ask("hello"))
        self.heads = subject.shape.query_heads

    def start(self, environment: dict[str, str] | None = None) -> KvpressClient:
        """A new kvpress process that has built the same model; raises KvfoldError as the class."""
        source = self.subject.source
        client = KvpressClient(self.python, environment)
        client.ask("hello", threads=torch.get_num_threads())
        answer = client.ask(
            "build",
            config=source.config,
            path=source.path,
            tokenizer=source.path if source.config is None else str(FOLDER),
            dtype=source.dtype,
            seed=source.seed,
        )
        last = sorted(self.subject.model.named_parameters())[-1][1].detach()
        if last.flatten()[:8].double().tolist() != answer["check"]:
            client.close()
            raise KvfoldError(
                f"{self.python} makes other random weights from the same seed: install the same "
                f"version of torch there, {torch.__version__}"
            )
        return client

    def left_out(self, label: ParticipantLabel, cell: BenchCell) -> str | None:
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
        self.client.close()

    def makers(self, wanted: Sequence[ParticipantLabel]) -> Makers:
        """Constructors of kvpress's full cache, and of its counterpart for each `wanted` label."""
        labels = [ParticipantLabel(self.name, FULL)]
        labels += [
            ParticipantLabel(self.name, label.method, label.budget)
            for label in wanted
            if press(label, 1) is not None
        ]
        return {label: partial(PressParticipant, self, label) for label in labels}


def free_memory() -> int:
    """Free bytes of the GPU, or of main memory without one."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class PressParticipant:
    """Participant that runs one press, or kvpress's full cache, in the process of `peer`."""

    def __init__(self, peer: KvpressPeer, label: ParticipantLabel) -> None:
        self.peer, self.label, self.key = peer, label, str(label)

    def prefill(self, ids: Tensor, room: int) -> PrefillCost:
        answer = self._prefill(self.peer.client, ids)
        return PrefillCost(answer["seconds"], answer["compression"], answer["peak"])

    def step(self, tokens: Tensor) -> float:
        answer = self.peer.client.ask("step", key=self.key, tokens=tokens.tolist())
        return float(answer["seconds"])

    def cache_size(self) -> CacheSize:
        answer = self.peer.client.ask("cache_size", key=self.key)
        return CacheSize(answer["nbytes"], answer["kept"])

    def free(self) -> None:
        self.peer.client.ask("free", key=self.key)

    def peak_alone(self, batch: int, length: int, room: int) -> int | None:
        if self.peer.subject.model.device.type != "cpu" or not can_measure():
            return None
        client = self.peer.start(ALLOCATOR)
        try:
            ids = self.peer.subject.tokens(batch, length)
            self._prefill(client, ids[:, :WARM_UP])
            client.ask("free", key=self.key)
            before = client.ask("mark")["bytes"]
            self._prefill(client, ids)
            return int(client.ask("peak")["bytes"]) - int(before)
        finally:
            client.close()

    def _prefill(self, client: KvpressClient, ids: Tensor) -> dict[str, Any]:
        spec = press(self.label, ids.shape[1])
        return client.ask("prefill", key=self.key, press=spec, ids=ids.tolist())
