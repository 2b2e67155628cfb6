# SPDX-License-Identifier: Apache-2.0
"""Consoles for standard output and standard error, shared by all programs of kvfold.

Texts are printed as they are: brackets are no markup, `:star:` is no emoji, and control characters
other than newline and tab are left out, as names, files and models could steer the terminal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.highlighter import JSONHighlighter
from rich.segment import Segment

WIDTH = 100
_CONTROLS = [code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"]
_LEFT_OUT = dict.fromkeys(_CONTROLS)
# A surrogate stands for a byte of a file's name that is no text.
_ESCAPED = {code: f"\\u{code:04x}" for code in (*_CONTROLS, *range(0xD800, 0xE000))}


class PlainConsole(Console):
    """Console that prints texts as they are, without their control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments of what is printed; those of rich itself, as of a spinner, keep their codes."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else text.translate(_LEFT_OUT), style, control)


def console() -> Console:
    """Console on standard output, at most 100 columns wide; silent on all ranks but the first."""
    out = PlainConsole(quiet=os.environ.get("RANK", "0") != "0")
    out.width = min(out.width, WIDTH)
    return out


def errors() -> Console:
    """Console on standard error; a message is one line, however narrow the terminal."""
    return PlainConsole(stderr=True, soft_wrap=True)


def messages(as_json: bool) -> Console:
    """Console for progress and notes: standard output, or standard error if that holds JSON."""
    if not as_json:
        return console()
    return PlainConsole(stderr=True, quiet=os.environ.get("RANK", "0") != "0")


def print_json(value: Any) -> None:
    """Prints JSON on standard output, without colours off a terminal; the first rank only.

    What the terminal should not or cannot take is escaped, not left out: what is read is the value.
    """
    out = console()
    narrow = not out.encoding.startswith("utf")
    text = json.dumps(value, indent=2, ensure_ascii=narrow, default=str).translate(_ESCAPED)
    out.print(JSONHighlighter()(text), soft_wrap=True)
