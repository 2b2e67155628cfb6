# SPDX-License-Identifier: Apache-2.0
"""The Makefile: paths as they are, a venv that was interrupted, models to fit."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import kvfold

MAKEFILE = Path(kvfold.__file__).parents[1] / "Makefile"
VENVS = (".venv", ".venv-vllm", ".venv-lmcache", ".venv-litellm", ".venv-ends/5.24.0")
# Writes its name and arguments, one a line.
TELLS = """#!/bin/sh
printf '%s\\n' "${0##*/}" "$@" "REAL is $REAL" >> told
"""
# Python whose `-m venv` is ended before pip is there, but not the second time. Not by SIGINT, which
# tests that run in the background ignore.
MAKES_VENVS = """#!/bin/sh
for folder; do :; done
mkdir -p "$folder/bin"
cp tool "$folder/bin/python"
test -e begun || { touch begun; kill -TERM $$; }
cp tool "$folder/bin/pip"
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the Makefile, and a tool that tells what it was asked."""
    shutil.copy(MAKEFILE, tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    _script(tmp_path / "tool", TELLS)
    return tmp_path


def _script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def made(folder: Path, *words: str, home: str = "/home/me") -> int:
    command = ["make", *words]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode


@pytest.mark.parametrize(
    ("real", "taken"),
    [
        ("my models/smollm2", "my models/smollm2"),
        ('it\'s; "so" `x`', 'it\'s; "so" `x`'),
        ("~/a b", "/home/me/a b"),
        ("~/two  spaces/of~/a, b", "/home/me/two  spaces/of~/a, b"),
        ("two  spaces/ ~/a", "two  spaces/ ~/a"),
        ("org/model", "org/model"),
        ("gemma3", ".models/gemma3"),
        (".models/gemma3", ".models/gemma3"),
        ("my gemma3", "my gemma3"),
    ],
)
def test_paths_are_taken_as_they_are(folder: Path, real: str, taken: str) -> None:
    (folder / ".venv/bin").mkdir(parents=True)
    for name in ("python", "kvfold"):
        shutil.copy(folder / "tool", folder / ".venv/bin" / name)
    for stamp in ("installed", "real", "ready"):
        (folder / ".venv" / stamp).touch()
    told = [
        *("python", "-m", "real_model.make", taken, f"REAL is {taken}"),
        *("kvfold", "demo", "--model", taken, "--book", "my  book.txt", f"REAL is {taken}"),
        *("python", "-m", "pytest", "tests_real", f"REAL is {taken}"),
    ]
    assert made(folder, "demo", "test-real", f"REAL={real}", "BOOK=my  book.txt") == 0
    assert (folder / "told").read_text(encoding="utf-8").splitlines() == told


@pytest.mark.parametrize("venv", VENVS)
def test_a_venv_that_was_interrupted_is_made_anew(folder: Path, venv: str) -> None:
    _script(folder / "makes-venvs", MAKES_VENVS)
    words = (f"{venv}/ready", "PYTHON=./makes-venvs")
    assert made(folder, *words) != 0
    assert (folder / venv / "bin/python").exists() and not (folder / venv / "bin/pip").exists()
    assert made(folder, *words) == 0
    assert (folder / venv / "ready").exists()


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("demo", {"."}),
        ("real", {".", ".[gguf]"}),
        ("fits", {".", ".[gguf]"}),
        ("check", {".", ".[dev]"}),
        ("test-real", {".", ".[gguf]", ".[dev]"}),
    ],
)
def test_a_target_installs_what_it_needs_alone(folder: Path, target: str, extras: set[str]) -> None:
    command = ["make", "--dry-run", target]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    editable = [line for line in ran.stdout.splitlines() if "--editable" in line]
    assert {line.split()[-1].strip('"') for line in editable} == extras


def test_a_folder_here_wins_over_the_name_of_a_model(folder: Path) -> None:
    (folder / ".venv").mkdir()
    (folder / ".venv/installed").touch()
    (folder / "gemma3").mkdir()
    command = ["make", "--dry-run", "demo", "REAL=gemma3", "--eval=$(info it is $(REAL))"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert "it is gemma3\n" in ran.stdout  # where make runs the tests, it says more


@pytest.mark.parametrize("model", ["", "REAL=smollm2", "REAL=gemma3", "REAL=.models/gemma3"])
def test_a_model_that_is_made_here_is_fitted_in_its_place(folder: Path, model: str) -> None:
    command = ["make", "--dry-run", "fits", *([model] if model else [])]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    fits = [line for line in ran.stdout.splitlines() if "kvfold fit" in line]
    place = ".models/gemma3" if "gemma3" in model else ".models/smollm2"
    assert len(fits) == 4
    assert all(f"fit {place} " in fit and f"--out {place}-" in fit for fit in fits)


@pytest.mark.parametrize("model", ["other", "gemma3 .models/smollm2", "my gemma3"])
def test_another_model_is_not_fitted_in_place_of_one_made(folder: Path, model: str) -> None:
    assert made(folder, "--dry-run", "fits", f"REAL={model}") != 0


def test_ci_s_versions_are_within_the_ranges_for_users() -> None:
    """Every requirement of the environments has one version, without a build's suffix."""
    pinned = {}
    for line in (MAKEFILE.parent / "constraints.txt").read_text("utf-8").splitlines():
        made = Requirement(line)
        (version,) = (each.version for each in made.specifier if each.operator == "==")
        assert Version(version).local is None
        pinned[canonicalize_name(made.name)] = version
    project = tomllib.loads((MAKEFILE.parent / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {Requirement(line) for line in project["dependencies"] + extras["dev"]}
    for asked in [each for each in wanted if each.name == "kvfold"]:
        wanted |= {Requirement(line) for extra in asked.extras for line in extras[extra]}
    for asked in (each for each in wanted if each.name != "kvfold"):
        assert asked.specifier.contains(pinned[canonicalize_name(asked.name)]), asked
