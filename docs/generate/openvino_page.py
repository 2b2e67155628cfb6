# SPDX-License-Identifier: Apache-2.0
"""The table of docs/results/openvino/README.md: `python -m docs.generate.openvino_page`.

OpenVINO's rows are those of benchmarks/openvino_peer.py; kvfold's are of the published records, and
of `kvfold eval` with as many entries as OpenVINO holds, docs/results/openvino/records.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

from benchmarks.openvino_peer import LENGTH, TASK, Row
from docs.generate.made import RESULTS, table, write_part
from kvfold.eval.run import run_folder
from kvfold.evidence.grouped import grouped
from kvfold.methods.description import without_files
from kvfold.report.load import load_results

FOLDER = RESULTS / "openvino"
PAGE, ROWS = FOLDER / "README.md", FOLDER / "rows.jsonl"
BEGIN = "<!-- made by docs/generate/openvino_page.py -->"
# Of the leaderboard at a fifth: what scores by attention, what keeps whole chunks, and the best.
SHOWN = ("snapkv", "h2o", "chunkkv", "kvzip", "zap")
COLUMNS = ["engine", "setting", "kept", "found, %", "samples"]


def load() -> list[Row]:
    """OpenVINO's published rows."""
    return [Row(**json.loads(line)) for line in ROWS.read_text("utf-8").splitlines()]


def named(setting: dict[str, Any]) -> str:
    """A setting in words."""
    if setting["mode"] == "full":
        return "full cache"
    scored = f"the last {setting['window']}" if setting["window"] else "all"
    return f"`{setting['mode']}`, {setting['most']} tokens, scored by {scored} queries"


def of_openvino(rows: Sequence[Row]) -> Iterator[list[str]]:
    """A line for each setting; kept are its fewest blocks, of those of its prompt."""
    for name, own in grouped((named(row.setting), row) for row in rows).items():
        yield [
            "OpenVINO",
            name,
            f"{mean(min(row.blocks) / row.blocks[0] for row in own):.2f}",
            f"{100 * mean(row.score for row in own):.1f}",
            f"{len(own)}",
        ]


def of_kvfold() -> Iterator[list[str]]:
    """Lines of the leaderboard at a fifth, and of what ran at OpenVINO's size."""
    files = [folder / run_folder.RECORDS for folder in (RESULTS, FOLDER)]
    for file in files:
        for one in load_results([file]) if file.is_file() else ():
            cell, name = one.cell, without_files(one.cell.method)
            asked = (cell.task, cell.length, cell.protocol.question_aware) == (TASK, LENGTH, True)
            shown = file.parent == FOLDER or (name in SHOWN and cell.budget in (None, "0.2"))
            if asked and shown and one.score is not None:
                score, kept = f"{one.score.value:.1f}", f"{one.kept:.2f}"
                yield ["kvfold", f"`{name}`", kept, score, f"{one.samples}"]


def part(rows: Sequence[Row]) -> str:
    """The table: each engine's lines, those that find most first."""
    best = sorted(of_openvino(rows), key=lambda line: -float(line[3]))
    ours = sorted(of_kvfold(), key=lambda line: -float(line[3]))
    return table(COLUMNS, [*best, *ours], left=[0, 1])


if __name__ == "__main__":
    write_part(PAGE, BEGIN, part(load()))
