# SPDX-License-Identifier: Apache-2.0
"""README and tutorials: short enough to read, and all of their code runs as it stands."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
LONGEST = 120
# The number hidden in the text, which a method that lost its entries cannot name.
NUMBER = "2241461"
# Language, first comment if it is a file's name, and code of a fenced block
BLOCK = re.compile(r"^```(sh|python)\n(?:# (\w+\.py)\n)?(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = {"python": '"{}" "$@"', "kvfold": '"{}" -m kvfold "$@"'}


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def printed(page: str, folder: Path) -> str:
    """What a page's commands print, run in one shell; its named Python files are there."""
    for name, command in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\nexec {command.format(sys.executable)}\n")
        (folder / name).chmod(0o755)
    script = ["set -eu", "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT"]
    for language, name, code in BLOCK.findall(page.replace("8017", str(free_port()))):
        if language == "python":
            (folder / (name or "first.py")).write_text(code, encoding="utf-8")
            script += [] if name else ["python first.py"]
        else:
            script.append(code)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    ran = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("page", [ROOT / "README.md", *TUTORIALS], ids=lambda page: page.stem)
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text(encoding="utf-8").splitlines()) <= LONGEST


@pytest.mark.slow
def test_the_code_of_readme_is_eight_lines_that_answer(tmp_path: Path) -> None:
    ((_, _, code),) = BLOCK.findall(README)
    assert len(code.splitlines()) == 8
    answer, *stats = printed(README, tmp_path).splitlines()
    assert NUMBER in answer
    assert "kept 20." in stats[1] and "(25.0%)" in stats[2]


def test_readme_s_table_is_that_of_the_gpu_s_records() -> None:
    lines = (ROOT / "docs" / "results" / "gpu" / "decode.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert {(one["model"], one["length"], one["dtype"]) for one in records} == {
        ("llama-3-8b", 32768, "bfloat16")
    }
    methods = ["transformers", "full", "snapkv", "adakv", "kivi:bits=4"]
    table = README.partition("| cache | GiB a request |")[2].partition("\n\n")[0]
    shown = [[cell.strip() for cell in row.split("|")[2:-1]] for row in table.splitlines()[2:]]
    expected = []
    for method in methods:
        own = {one["batch"]: one for one in records if one["method"] == method}
        rates = [f"{own[batch]['tokens_per_second']:.0f}" for batch in (max(own), 24, 1)]
        expected.append([f"{own[1]['row_bytes'] / 2**30:.2f}", str(max(own)), *rates])
    assert shown == expected


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("serve-documents", [NUMBER, '"id":"contract"', NUMBER]),
        ("compare-methods", ["kvzip", "random", "compactor", "no certificate"]),
        ("own-method", ["value_norm + kivi:bits=4", "the same entries"]),
    ],
)
def test_a_tutorial_s_commands_run(name: str, told: list[str], tmp_path: Path) -> None:
    """Each text is printed after the one before."""
    (page,) = (page for page in TUTORIALS if page.stem == name)
    rest = printed(page.read_text(encoding="utf-8"), tmp_path)
    for text in told:
        before, found, rest = rest.partition(text)
        assert found, before
