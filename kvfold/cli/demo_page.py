# SPDX-License-Identifier: Apache-2.0
"""HTML page of `kvfold demo`: its printed output, and the picture of kept positions."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.figure import Figure
from rich.console import RenderableType
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from kvfold.evidence.page import picture, whole
from kvfold.terminal import WIDTH, PlainConsole

# rich's colour of dim text, whose contrast on white is 4.0, and one of 6.4.
DIM, READABLE = "#7f7f7f", "#5f5f5f"
TITLE = "kvfold demo: a model's memory, compressed"
ABOUT = (
    "KV cache compression on the model that comes with kvfold: answers, kept entries, bytes and "
    "times of each method."
)
STYLE = """
body { color: #000000; background: #ffffff; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
pre { font: 0.85rem/1.35 ui-monospace, monospace; overflow-x: auto }
img { max-width: 100% }
"""
PRINTED = '<pre tabindex="0" role="region" aria-label="The demo\'s output">{code}</pre>'
BETWEEN = "<!-- style -->"


def page(parts: Sequence[RenderableType], drawn: Figure) -> str:
    """A self-contained HTML page: `parts` as in a terminal, and the picture below."""
    screen = PlainConsole(record=True, file=io.StringIO(), width=WIDTH)
    for part in parts:
        screen.print(part)
    text = screen.export_html(
        theme=DEFAULT_TERMINAL_THEME, code_format=f"{{stylesheet}}{BETWEEN}{PRINTED}"
    )
    style, _, printed = text.partition(BETWEEN)
    kept = picture(drawn, "Positions that each method kept, layer by layer")
    body = f"<h1>kvfold demo</h1>\n{printed}\n{kept}\n"
    return whole(TITLE, ABOUT, f"{STYLE}{style.replace(DIM, READABLE)}", body)
