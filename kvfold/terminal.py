# SPDX-License-Identifier: Apache-2.0
"""Standard output and standard error of every program of kvfold."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

WIDTH = 100


def console() -> Console:
    """Standard output, at most 100 columns wide; of several ranks only the first one's."""
    out = Console(highlight=False, quiet=os.environ.get("RANK", "0") != "0")
    out.width = min(out.width, WIDTH)
    return out


def errors() -> Console:
    """Standard error, where a message stays one line however narrow the terminal."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def messages(as_json: bool) -> Console:
    """Where progress and notes go: to standard output, but with JSON on it to standard error."""
    if not as_json:
        return console()
    return Console(stderr=True, highlight=False, quiet=os.environ.get("RANK", "0") != "0")


def print_json(value: Any) -> None:
    """JSON on standard output, plain where that is no terminal; of ranks only the first one's."""
    console().print_json(data=value, default=str)
