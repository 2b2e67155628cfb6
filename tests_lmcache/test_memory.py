# SPDX-License-Identifier: Apache-2.0
"""One edit of 16,384 tokens of a 1.7 B-model shape, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "lmcache_edit.py"


# The input is the keys and values, 1.88 GB, and as much of queries for a method that reads them.
@pytest.mark.parametrize("method, given", [("snapkv", "3.76"), ("keydiff", "1.88")])
def test_a_long_prompt_is_edited_right_within_two_gigabytes_beyond_its_input(
    method: str, given: str
) -> None:
    command = [sys.executable, str(SCRIPT), "--methods", method, "--threads", str(os.cpu_count())]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"{method}: 8192 of 16384 tokens, right, ")
    peak = re.search(r"peak ([\d.]+) GB beyond the input", ran.stdout)
    assert peak and float(peak[1]) < 2 and f"; {given} GB of input" in ran.stdout
