# SPDX-License-Identifier: Apache-2.0
"""Client of the kvpress process: requests and answers are lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kvfold.errors import KvfoldError

SCRIPT = Path(__file__).with_name("kvpress_server.py")
INSTALL = "-m pip install torch 'kvpress==0.5.5' 'transformers<5.3'"


class KvpressClient:
    """A running kvpress process, started with `environment` added to this process's.

    Raises KvfoldError if `python` cannot be run.
    """

    def __init__(self, python: Path, environment: dict[str, str] | None = None) -> None:
        self.python = python
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (open while it runs)
        # Isolated (-I): otherwise files of this folder would shadow modules such as "kernels".
        try:
            self._process = subprocess.Popen(
                [str(python), "-I", str(SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | (environment or {}),
                text=True,
            )
        except OSError as problem:
            raise KvfoldError(f"cannot run {python}: {problem}") from problem

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to the request `do`; raises KvfoldError if it fails or the process died."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise KvfoldError(self._reason())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise KvfoldError(f"kvpress failed: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def _reason(self) -> str:
        """Why the process ended, from the last line of its standard error."""
        self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["it was killed"])[-1]
        if "ModuleNotFoundError" in last or "ImportError" in last:
            return f"{self.python} cannot import kvpress ({last}): run {self.python} {INSTALL}"
        return f"the kvpress process ended: {last}"
