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
@pytest.mark.parametrize(
    ("command", "said"),
    [(("methods",), "snapkv"), (("--help",), "Usage"), (("tasks", "--json"), "niah_magic")],
    ids=["methods", "help", "tasks"],
)
def test_any_encoding_will_do(command: tuple[str, ...], said: str, encoding: str) -> None:
    where = os.environ | {"PYTHONIOENCODING": encoding}
    ran = subprocess.run([*PROGRAM, *command], capture_output=True, env=where, check=False)
    assert ran.returncode == 0, ran.stderr
    printed = ran.stdout.decode(encoding)
    assert said in printed
    if "--json" in command:
        assert json.loads(printed)
