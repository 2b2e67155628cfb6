# SPDX-License-Identifier: Apache-2.0
r"""Cells of the published leaderboard, run again and compared with what was published:

    python -m docs.results.reproduce MODEL BOOK [kvzip@0.2 snapkv@0.2 knorm@0.2] [--task TASK]
    python -m docs.results.reproduce .models/gemma3 BOOK kvzip@0.2 snapkv@0.2 h2o@0.2 \
        --published docs/results/two_models/gemma3.csv.gz

BOOK is the haystack of the published run. Samples are drawn again, and answers, their scores and
lengths, and the entries kept are compared. Exits with 1 if any differ.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from docs.generate import compact_samples
from kvfold.eval.evaluate import evaluate
from kvfold.loading import load

PUBLISHED = Path(__file__).with_name("samples.csv.gz")
CELLS = ["kvzip@0.2", "snapkv@0.2", "knorm@0.2"]
COMPARED = ("text", "score", "tokens", "ended", "kept", "prediction", "error")
# The leaderboard's own: another batch sums in another order, which may change a wrong answer.
SAMPLES, BATCH, LENGTH, ANSWER_TOKENS = 40, 10, 1024, 16

Row = Mapping[str, str]


def of_cells(rows: Iterable[Row], task: str, cells: Sequence[str]) -> dict[tuple[str, str], Row]:
    """Rows of the cells before the question is known, by cell and sample."""
    return {
        (f"{row['method']}@{row['budget']}", row["index"]): row
        for row in rows
        if (row["task"], row["length"], row["question_aware"]) == (task, str(LENGTH), "0")
        and f"{row['method']}@{row['budget']}" in cells
    }


def differing(
    published: Mapping[tuple[str, str], Row], again: Mapping[tuple[str, str], Row]
) -> list[str]:
    """A line for each sample that is not as published."""
    lines = []
    for key in sorted(published.keys() | again.keys()):
        before, now = published.get(key), again.get(key)
        if before is None or now is None:
            lines.append(f"{key}: only {'published' if now is None else 'run again'}")
            continue
        lines += [
            f"{key}: {name} was {before[name]!r}, is {now[name]!r}"
            for name in COMPARED
            if before[name] != now[name]
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("book", type=Path)
    parser.add_argument("cells", nargs="*", default=CELLS, help="method@budget")
    parser.add_argument("--task", default="ruler_niah_single_2")
    parser.add_argument("--published", type=Path, default=PUBLISHED, help="samples of the model")
    given = parser.parse_args()
    published = of_cells(compact_samples.read(given.published), given.task, given.cells)
    if len(published) != SAMPLES * len(given.cells):
        parser.error(f"not all of {', '.join(given.cells)} is published for {given.task}")
    model, tokenizer = load(given.model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for cell in given.cells:
            method, budget = cell.split("@")
            evaluate(
                model, tokenizer, given.task, method, budget, samples=SAMPLES, lengths=LENGTH,
                haystack=given.book, answer_tokens=ANSWER_TOKENS, batch_size=BATCH, out=folder,
            )  # fmt: skip
        compact_samples.main(folder, folder / "again.csv.gz")
        again = of_cells(compact_samples.read(folder / "again.csv.gz"), given.task, given.cells)
    lines = differing(published, again)
    print(
        "\n".join(lines) or f"{len(published)} answers of {len(given.cells)} cells are as published"
    )
    raise SystemExit(bool(lines))


if __name__ == "__main__":
    main()
