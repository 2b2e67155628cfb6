# SPDX-License-Identifier: Apache-2.0
"""Every method on all retrieval tasks of the bundled model: `python benchmarks/all_methods.py`.

"agnostic" compresses the document before the question is known, "aware" with the question in view.
A cell is the mean over all tasks. Run again, it goes on where it stopped; `--table` shows it.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import kvfold
from kvfold.eval.retrieval import Trial, evaluate
from kvfold.eval.ruler import TASKS

LENGTH = 1024
KEPT = (0.5, 0.2, 0.1)
WITH_BUDGET = (
    "random", "local_window", "streaming_llm", "streaming_llm_original", "knorm", "tova", "h2o",
    "roco", "cam", "snapkv", "pyramidkv", "adakv", "pyramidkv + adakv", "d2o", "d2o:merge=none",
    "h2o + merge", "kvzip", "kvzip:level=uniform", "snapkv + kivi", "kvzip:level=uniform + kivi",
)  # fmt: skip
# SimLayerKV's window is an eighth of the length, as its 1024 is of the 8 k of its models.
WITHOUT_BUDGET = (
    "full", "kivi", "kivi:bits=2", "think", "minicache", "pyramidinfer",
    f"simlayerkv:window={LENGTH // 8}", f"simlayerkv_llama2:window={LENGTH // 8}",
    "dbudgetkv", "dbudgetkv:threshold=0.1", "auto", "auto:tolerance=0.2",
)  # fmt: skip


def cells() -> list[tuple[str, float | None, bool]]:
    """Method, kept, and whether the question is in view."""
    budgets = [(m, None) for m in WITHOUT_BUDGET] + [(m, k) for k in KEPT for m in WITH_BUDGET]
    return [(method, kept, aware) for method, kept in budgets for aware in (False, True)]


def measure(path: Path, samples: int) -> None:
    """Adds a line for every cell that `path` does not hold yet."""
    done = {(r["method"], r["kept"], r["aware"]) for r in read(path)}
    model, tokenizer = kvfold.bundled_model()
    for method, kept, aware in cells():
        if (method, kept, aware) in done:
            continue
        outcomes = []
        for task in TASKS:
            trial = Trial(task, LENGTH, method, kept, question_aware=aware)
            outcomes += list(evaluate(model, tokenizer, trial, samples))
        n = len(outcomes)
        mean = sum(o.score for o in outcomes) / n
        spread = sum((o.score - mean) ** 2 for o in outcomes) / (n - 1)
        record = {
            "method": method, "kept": kept, "aware": aware, "samples": n,
            "score": round(100 * mean, 1), "error": round(100 * math.sqrt(spread / n), 1),
            "entries": round(sum(o.kept for o in outcomes) / n, 4),
            "bytes": round(sum(o.bytes for o in outcomes) / n, 4),
        }  # fmt: skip
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(record, flush=True)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(path: Path) -> None:
    """Prints Markdown: agnostic / aware and bytes per budget."""
    found = {(r["method"], r["kept"], r["aware"]): r for r in read(path)}

    def cell(method: str, kept: float | None) -> str:
        both = [found.get((method, kept, aware)) for aware in (False, True)]
        if None in both:
            return ""
        return f"{both[0]['score']:.0f} / {both[1]['score']:.0f} ({both[0]['bytes']:.2f})"

    print("| method | " + " | ".join(f"kept {kept}" for kept in KEPT) + " |")
    print("|---|" + "---|" * len(KEPT))
    for method in WITH_BUDGET:
        print(f"| {method} | " + " | ".join(cell(method, kept) for kept in KEPT) + " |")
    print("\n| method | entries kept | agnostic / aware (bytes) |\n|---|---|---|")
    for method in WITHOUT_BUDGET:
        entries = found.get((method, None, False), {}).get("entries", 0)
        print(f"| {method} | {entries:.2f} | {cell(method, None)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10, help="of each task")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/all_methods.jsonl"))
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        table(arguments.out)
    else:
        measure(arguments.out, arguments.samples)


if __name__ == "__main__":
    main()
