# SPDX-License-Identifier: Apache-2.0
"""Standard output that cannot take what a command prints: a full disk, other encodings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-c", "from kvfold.cli import main; main()"]


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("command", [("methods",), ("tasks", "--json"), ("--help",)])
def test_a_full_disk_is_one_line_and_exit_code_2(command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [*PROGRAM, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == [f"error: [Errno 28] {os.strerror(28)}"]


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_will_do(encoding: str) -> None:
    def printed(*command: str) -> str:
        where = os.environ | {"PYTHONIOENCODING": encoding}
        ran = subprocess.run([*PROGRAM, *command], capture_output=True, env=where, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.decode(encoding)

    assert "snapkv" in printed("methods")
    assert "Usage" in printed("--help")
    assert "niah_magic" in {task["name"] for task in json.loads(printed("tasks", "--json"))}
