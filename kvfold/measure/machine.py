# SPDX-License-Identifier: Apache-2.0
"""Machine, library versions and commit that a measurement depends on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch
import transformers
from pydantic import BaseModel

import kvfold


class MachineSetup(BaseModel, frozen=True):
    """Hardware, threads and versions; times are only comparable between equal setups."""

    cpu: str
    cores: int
    gpu: str | None
    threads: int
    python: str
    versions: dict[str, str]

    @classmethod
    def here(cls) -> MachineSetup:
        """The setup of this process; the GPU counts once the process has used it."""
        return cls(
            cpu=_cpu(),
            cores=os.cpu_count() or 1,
            gpu=torch.cuda.get_device_name() if torch.cuda.is_initialized() else None,
            threads=torch.get_num_threads(),
            python=platform.python_version(),
            versions={
                "kvfold": kvfold.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        )

    def differences(self, other: MachineSetup) -> list[str]:
        """One sentence per field that differs, this setup's value before the `other`'s."""
        ours, theirs = self.model_dump(), other.model_dump()
        ours |= ours.pop("versions")
        theirs |= theirs.pop("versions")
        return [
            f"{name} is {ours.get(name)}, there {theirs.get(name)}"
            for name in ours | theirs
            if ours.get(name) != theirs.get(name)
        ]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str | None:
    """Commit of the running kvfold, "-dirty" with uncommitted changes; None outside a checkout."""
    folder = Path(kvfold.__file__).parents[1]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None
