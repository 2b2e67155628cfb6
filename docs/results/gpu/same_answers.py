# SPDX-License-Identifier: Apache-2.0
"""Answers of two runs, compared sample by sample: a GPU's with a CPU's.

    python -m docs.results.gpu.same_answers ONE.csv.gz OTHER.csv.gz

The files are those of `docs/generate/compact_samples.py`. Prints how many answers both have, and
in how many the text, the score, and the number of entries kept are the same, then the answers that
differ in score.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from docs.generate import compact_samples

SAME_KEPT = 1.5e-5  # shares are written with five decimals
ANSWER = ("task", "length", "question_aware", "data", "method", "budget", "index", "turn")


def compared(one: Path, other: Path) -> dict[str, Any]:
    """The counts, and the answers whose score differs."""
    ours, theirs = (
        {tuple(row[name] for name in ANSWER): row for row in compact_samples.read(file)}
        for file in (one, other)
    )
    pairs = [(answer, ours[answer], theirs[answer]) for answer in ours if answer in theirs]
    return {
        "answers": len(pairs),
        "text": sum(a["prediction"] == b["prediction"] for _, a, b in pairs),
        "score": sum(a["score"] == b["score"] for _, a, b in pairs),
        "kept": sum(abs(float(a["kept"]) - float(b["kept"])) < SAME_KEPT for _, a, b in pairs),
        "other_score": [" ".join(answer) for answer, a, b in pairs if a["score"] != b["score"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("one", type=Path)
    parser.add_argument("other", type=Path)
    given = parser.parse_args()
    print(json.dumps(compared(given.one, given.other), indent=1))


if __name__ == "__main__":
    main()
