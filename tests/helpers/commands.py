# SPDX-License-Identifier: Apache-2.0
"""The command line, called as a user calls it."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from kvfold.cli import app


def kvfold_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})


def refused(*arguments: str) -> str:
    """The message of a command that must be refused: the last line, after loading bars."""
    result = kvfold_command(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    message = result.stderr.splitlines()[-1]
    assert message.startswith("error: ")
    return message


def run_json(*arguments: str) -> dict[str, Any]:
    result = kvfold_command(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
