# SPDX-License-Identifier: Apache-2.0
"""The page for users of kvpress, made from docs/kvpress.toml."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from docs.generate.made import DOCS, RESULTS
from kvfold.methods.base import parse


def table() -> dict[str, Any]:
    """The file: its texts, and the rows `press` and `none`."""
    return tomllib.loads((DOCS / "kvpress.toml").read_text("utf-8"))


def sets() -> dict[str, Any]:
    """The measurements of docs/results/kvpress/measure.py, by the press."""
    measured: dict[str, Any] = json.loads((RESULTS / "kvpress" / "sets.json").read_text("utf-8"))
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
    head = known["head"].format(of=of, **known)
    return "\n".join([head, *rows, "", known["absent"], *absent, ""])


def _linked(spec: str) -> str:
    """The spec, as a link to the page of its only method, or of the first that it adds."""
    parts = spec.split(" + ")
    return f"[`{spec}`](methods/{parse(parts[min(1, len(parts) - 1)]).name}.md)" if spec else ""
