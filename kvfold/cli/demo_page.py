# SPDX-License-Identifier: Apache-2.0
"""HTML page of `kvfold demo`: its printed output, and the picture of kept positions."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

from matplotlib.figure import Figure
from rich.console import RenderableType
from rich.terminal_theme import DEFAULT_TERMINAL_THEME

from kvfold.terminal import WIDTH, PlainConsole

# rich's colour of dim text, whose contrast on white is 4.0, and one of 6.4.
DIM, READABLE = "#7f7f7f", "#5f5f5f"
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="kvfold">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvfold demo: a model's memory, compressed</title>
<meta name="description" content="KV cache compression on the model that comes with kvfold: \
answers, kept entries, bytes and times of each method.">
<style>
body {{ color: {foreground}; background: {background}; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem }}
pre {{ font: 0.85rem/1.35 ui-monospace, monospace; overflow-x: auto }}
img {{ max-width: 100% }}
</style>
</head>
<body>
<h1>kvfold demo</h1>
<pre tabindex="0" role="region" aria-label="The demo's output">{code}</pre>
<figure><img alt="Positions that each method kept, layer by layer" src="@@PICTURE@@"></figure>
</body>
</html>
"""


def page(parts: Sequence[RenderableType], picture: Figure) -> str:
    """A self-contained HTML page: `parts` as in a terminal, and the picture below."""
    screen = PlainConsole(record=True, file=io.StringIO(), width=WIDTH)
    for part in parts:
        screen.print(part)
    text = screen.export_html(theme=DEFAULT_TERMINAL_THEME, inline_styles=True, code_format=PAGE)
    drawn = io.BytesIO()
    picture.savefig(drawn, format="png")
    encoded = base64.b64encode(drawn.getvalue()).decode()
    text = text.replace(DIM, READABLE)
    return text.replace("@@PICTURE@@", f"data:image/png;base64,{encoded}")
