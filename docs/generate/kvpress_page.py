# SPDX-License-Identifier: Apache-2.0
"""The page for users of kvpress, made from docs/kvpress.toml."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from docs.generate.made import DOCS
from kvfold.methods.base import parse

HEAD = """\
# Coming from kvpress

| kvpress | kvfold |
|---|---|
| `press = SnapKVPress(compression_ratio=0.8)` | `CompressedCache(model, "snapkv", budget=0.2)` |
| `with press(model): model.generate(…)` | `with kvfold.enable(model, "snapkv", 0.2): …` |
| `compression_ratio`, the part removed | `budget`, the part kept, or tokens, or bytes |
| hooks on all layers while `with` lasts | one attention function; caches share a model |
| the ratio that was asked for | `cache.stats()`: entries and bytes of the tensors |

## Methods

*Equal sets*: of {of} KV heads (layers × heads × prompts × budgets of a small random Llama), those
in which both libraries keep the same tokens, by `python -m docs.results.kvpress.measure`. Presses
that need a download, a file or another part of kvfold have none.
"""
COLUMNS = "| kvpress {version} | kvfold | equal sets | what differs |\n|---|---|---|---|"
NONE = "## Without a counterpart\n\n| kvpress | why |\n|---|---|"


def table() -> dict[str, Any]:
    """The file's rows: `press`, and `none`."""
    return tomllib.loads((DOCS / "kvpress.toml").read_text("utf-8"))


def sets() -> dict[str, Any]:
    """The measurements of docs/results/kvpress/measure.py, by the press."""
    measured: dict[str, Any] = json.loads(
        (DOCS / "results" / "kvpress" / "sets.json").read_text("utf-8")
    )
    return measured


def page() -> str:
    """The page as Markdown; names of methods link to their pages."""
    known, measured = table(), sets()
    rows = [
        f"| `{row['name']}` | {_linked(row['spec']) or row['instead']} | "
        f"{measured.get(row['name'], {}).get('equal', '–')} | {row['differs'] or '–'} |"
        for row in known["press"]
    ]
    (of,) = {each["of"] for each in measured.values()}
    absent = [f"| {row['name']} | {row['why']} |" for row in known["none"]]
    return "\n".join([HEAD.format(of=of), COLUMNS.format(**known), *rows, "", NONE, *absent, ""])


def _linked(spec: str) -> str:
    """The spec, as a link to the page of its only method, or of the first that it adds."""
    parts = spec.split(" + ")
    return f"[`{spec}`](methods/{parse(parts[min(1, len(parts) - 1)]).name}.md)" if spec else ""
