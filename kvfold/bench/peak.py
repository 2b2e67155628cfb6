# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a prefill on a CPU, measured in a fresh process.

The resident size of a used process hides later allocations that fit into freed memory. So a new
process loads the model, warms up, resets its high-water mark (VmHWM), and reads one prompt.
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

# glibc returns freed tensors to the system at once, so that VmHWM counts live ones only.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
RESET = Path("/proc/self/clear_refs")
WARM_UP = 64


def can_measure() -> bool:
    """True if this system can reset a process's high-water mark (Linux)."""
    return RESET.exists()


def peak_of(spec: dict[str, Any], batch: int, length: int, room: int) -> int:
    """Peak bytes of a prefill of `[batch, length]` tokens, above loaded weights, in a new process.

    `spec` comes from `LocalParticipant.spec`. Raises KvfoldError if the process fails.
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
    """A field of /proc/self/status, such as VmRSS, in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    """Reads a participant's spec as JSON from standard input, prints its peak as JSON."""
    from kvfold.bench.models import BenchModel
    from kvfold.bench.participants import FullParticipant, LocalParticipant, MethodParticipant
    from kvfold.bench.sdpa_variants import SdpaChoice, SdpaVariant
    from kvfold.bench.transformers_quantized import QuantizedParticipant

    spec = json.load(sys.stdin)
    torch.set_num_threads(spec["threads"])
    subject = BenchModel.of(spec["name"], spec["dtype"], spec["seed"])
    participant: LocalParticipant
    if spec["side"] == "baseline":
        kernels = SdpaChoice(SdpaVariant(spec["prefill"]), SdpaVariant(spec["decode"]))
        participant = FullParticipant(subject, kernels)
    elif spec["side"] == "transformers":
        participant = QuantizedParticipant(subject)
    else:
        participant = MethodParticipant(subject, spec["method"], spec["budget"])
    ids: Tensor = subject.tokens(spec["batch"], spec["length"])
    # Warm-up: weights are paged in and libraries initialised before the measurement.
    participant.prefill(ids[:, :WARM_UP], 1)
    participant.free()
    RESET.write_text("5")
    before = memory("VmRSS")
    participant.prefill(ids, spec["room"])
    print(json.dumps({"peak_bytes": memory("VmHWM") - before}))


if __name__ == "__main__":
    main()
