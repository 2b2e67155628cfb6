# SPDX-License-Identifier: Apache-2.0
"""Standard output that cannot take what a command prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-c", "from kvfold.cli import main; main()"]


@pytest.mark.slow
@pytest.mark.parametrize("command", [("methods",), ("tasks", "--json"), ("--help",)])
def test_a_full_disk_is_one_line_and_exit_code_2(command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [*PROGRAM, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == [f"error: [Errno 28] {os.strerror(28)}"]
