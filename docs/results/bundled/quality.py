# SPDX-License-Identifier: Apache-2.0
"""Scores of methods on the bundled model: `python -m docs.results.bundled.quality`.

Four needles, a question about one. "aware" compresses context and question together, "agnostic" the
context alone. Every score is the share of right answers to fresh samples, the same for all methods.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

import kvfold
from kvfold.eval.short_ruler_scores import RetrievalTrial, retrieval_scores

METHODS = ("snapkv", "pyramidkv", "h2o", "streaming_llm", "random")
KEPT = (0.2, 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("docs/results/bundled/quality.json"))
    arguments = parser.parse_args()
    model, tokenizer = kvfold.bundled_model()
    records = []

    def score(method: str, kept: float | None, aware: bool) -> str:
        trial = RetrievalTrial("multikey", arguments.length, method, kept, question_aware=aware)
        results = list(retrieval_scores(model, tokenizer, trial, arguments.samples))
        percent = 100 * sum(result.score for result in results) / len(results)
        records.append(
            {"method": method, "kept": kept, "question_aware": aware, "score": round(percent, 1)}
        )
        print(records[-1], flush=True)
        return f"{percent:.0f}"

    table = Table(title=f"multikey at {arguments.length} tokens, n = {arguments.samples}")
    table.add_column("method")
    for kept in KEPT:
        for protocol in ("aware", "agnostic"):
            table.add_column(f"{protocol}, kept {kept}", justify="right")
    table.add_row("full", score("full", None, True))
    for method in METHODS:
        table.add_row(method, *(score(method, k, aware) for k in KEPT for aware in (True, False)))
    Console().print(table)
    arguments.out.write_text(
        json.dumps(
            {"task": "multikey", "length": arguments.length, "samples": arguments.samples,
             "records": records},
            indent=1,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
