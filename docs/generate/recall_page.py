# SPDX-License-Identifier: Apache-2.0
"""Picture and table of docs/results/recall/README.md: `python -m docs.generate.recall_page`.

Records are those of docs/results/recall/measure.py. Equal records give equal files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.ticker import PercentFormatter

from docs.generate.made import RESULTS, picture, table, write_part
from kvfold.evidence.grouped import grouped

OUT = RESULTS / "recall"
PAGE, PICTURE = OUT / "README.md", OUT / "kl-against-bytes.svg"
BEGIN = "<!-- made by docs/generate/recall_page.py -->"
NUMBERS = ("kl", "bytes", "overlap")
Means = dict[tuple[str, float | None], dict[str, float]]


def load() -> Means:
    """Means over books, by method and budget, in the order of the records."""
    lines = (OUT / "rows.jsonl").read_text("utf-8").splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    found = grouped(((row["method"], row["budget"]), row) for row in rows)
    return {
        key: {name: fmean(row[name] for row in own) for name in own[0] if name in NUMBERS}
        for key, own in found.items()
    }


def part(means: Means) -> str:
    """A row for each method and budget."""
    columns = ["method", "budget", "hot bytes", "KL", "read again"]
    rows = [
        [
            f"`{method}`",
            "" if budget is None else f"{budget:g}",
            f"{found['bytes']:.1%}",
            f"{found['kl']:.4f}",
            f"{found['overlap']:.0%}" if "overlap" in found else "",
        ]
        for (method, budget), found in means.items()
    ]
    return table(columns, rows, left=[0])


def draw(means: Means, path: Path) -> None:
    """KL against hot bytes: lines of methods over budgets, and a point for each way to recall."""
    with picture(path, 6.5, 4.5) as figure:
        axes = figure.subplots()
        for name in ("kvzip", "snapkv", "snapkv + recall"):
            own = [found for (method, _), found in means.items() if method == name]
            axes.plot(*_places(own), "o-", label=name)
        shares = {m: found for (m, _), found in means.items() if m.startswith("recall:read")}
        axes.plot(*_places(list(shares.values())), "s--", label="recall, read 0.01 to 0.1")
        axes.set(xlabel="hot bytes, of a full cache of 16 bits", ylabel="KL, nats per token")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
        axes.legend()


def _places(found: Sequence[dict[str, float]]) -> tuple[list[float], list[float]]:
    return [each["bytes"] for each in found], [each["kl"] for each in found]


if __name__ == "__main__":
    write_part(PAGE, BEGIN, part(load()))
    draw(load(), PICTURE)
