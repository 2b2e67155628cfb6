# SPDX-License-Identifier: Apache-2.0
"""Peak memory: of a GPU's allocations, or of a process that does one piece of work on a CPU.

The resident size of a used process hides later allocations that fit into freed memory. So a new
process warms up, resets its high-water mark (VmHWM), and does the work once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvfold.errors import KvfoldError

# glibc returns freed tensors to the system at once, so that VmHWM counts live ones only.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
RESET = Path("/proc/self/clear_refs")
WARM_UP = 64  # tokens of a prompt that no measurement counts


def can_measure() -> bool:
    """True if this system can reset a process's high-water mark (Linux)."""
    return RESET.exists()


def peak_of(module: str, spec: dict[str, Any], what: str) -> int:
    """Peak bytes that `module` prints as JSON, run in a new process with `spec` as its input.

    The spec gets this process's `threads`. Raises KvfoldError, naming `what`, if it fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(spec | {"threads": torch.get_num_threads()}),
        env=os.environ | ALLOCATOR,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise KvfoldError(f"cannot measure the peak of {what}: {last}")
    return int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])


def peak_during(work: Callable[[], object]) -> int:
    """Peak bytes of `work` above those of the process before it."""
    RESET.write_text("5")
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def memory(field: str) -> int:
    """A field of /proc/self/status, such as VmRSS, in bytes."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def allocated(device: torch.device) -> int | None:
    """Bytes that a GPU has allocated, with its peak reset to them; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_above(device: torch.device, before: int | None) -> int | None:
    """Peak bytes of a GPU above those `allocated` before; None on a CPU."""
    return None if before is None else torch.cuda.max_memory_allocated(device) - before
