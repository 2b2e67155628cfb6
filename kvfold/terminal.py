# SPDX-License-Identifier: Apache-2.0
"""Consoles for standard output and standard error, shared by all programs of kvfold."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console

WIDTH = 100


def console() -> Console:
    """Console on standard output, at most 100 columns wide; silent on all ranks but the first."""
    out = Console(highlight=False, quiet=os.environ.get("RANK", "0") != "0")
    out.width = min(out.width, WIDTH)
    return out


def errors() -> Console:
    """Console on standard error; a message is one line, however narrow the terminal."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def messages(as_json: bool) -> Console:
    """Console for progress and notes: standard output, or standard error if that holds JSON."""
    if not as_json:
        return console()
    return Console(stderr=True, highlight=False, quiet=os.environ.get("RANK", "0") != "0")


def print_json(value: Any) -> None:
    """Prints JSON on standard output, without colours off a terminal; the first rank only."""
    console().print_json(data=value, default=str)
