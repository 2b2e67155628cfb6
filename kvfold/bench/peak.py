# SPDX-License-Identifier: Apache-2.0
"""The most memory a prefill takes on a CPU, in a process of its own.

A process's high-water mark never falls, and what it freed before hides what it takes next: so a
fresh one loads the model, warms up, and reads one prompt.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvfold.errors import KvfoldError

# Large tensors come from the system and go back at once, so that the mark counts live ones only.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
RESET = Path("/proc/self/clear_refs")
WARM_UP = 64


def can_measure() -> bool:
    """Whether this system resets a process's high-water mark."""
    return RESET.exists()


def peak_of(spec: dict[str, Any], batch: int, length: int, room: int) -> int:
    """Bytes that a side, named by its `spec`, takes for its prompt in a new process.

    Raises KvfoldError where that process fails.
    """
    work = {"batch": batch, "length": length, "room": room, "threads": torch.get_num_threads()}
    done = subprocess.run(
        [sys.executable, "-m", "kvfold.bench.peak"],
        input=json.dumps(spec | work),
        env=os.environ | ALLOCATOR,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise KvfoldError(f"cannot measure the peak of {spec['method']}: {last}")
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def memory(field: str) -> int:
    """A field of this process's status, in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    """Reads what to measure from standard input, and prints the peak."""
    from kvfold.bench.participants import FullSide, LocalSide, MethodSide
    from kvfold.bench.quantized import QuantizedSide
    from kvfold.bench.sdpa_variants import Kernel, Kernels
    from kvfold.bench.shapes import Subject

    spec = json.load(sys.stdin)
    torch.set_num_threads(spec["threads"])
    subject = Subject.of(spec["name"], spec["dtype"], spec["seed"])
    side: LocalSide
    if spec["side"] == "baseline":
        kernels = Kernels(Kernel(spec["prefill"]), Kernel(spec["decode"]))
        side = FullSide(subject, kernels)
    elif spec["side"] == "transformers":
        side = QuantizedSide(subject)
    else:
        side = MethodSide(subject, spec["method"], spec["budget"])
    ids: Tensor = subject.tokens(spec["batch"], spec["length"])
    # Weights are read and libraries set up before anything counts.
    side.prefill(ids[:, :WARM_UP], 1)
    side.free()
    RESET.write_text("5")
    before = memory("VmRSS")
    side.prefill(ids, spec["room"])
    print(json.dumps({"peak_bytes": memory("VmHWM") - before}))


if __name__ == "__main__":
    main()
