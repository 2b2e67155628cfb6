# SPDX-License-Identifier: Apache-2.0
"""Evaluate methods on your own questions: python examples/evaluate_own_data.py [MODEL]"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import kvfold
from kvfold.loading import load

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "One of the special magic numbers for {} is: {}. "
QUESTION = "What is the special magic number for {} mentioned in the provided text?"
NUMBERS = {"soft-bell": "2241461", "calm-river": "8305127", "deep-lake": "5190736"}

# A hub id or a folder; without one, the small model that comes with kvfold.
model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "bundled")

# One JSON object a line: a document, a question about it, and the right answer.
rows = [
    {
        "context": NOISE * 6 + NEEDLE.format(key, number) + NOISE * 6,
        "question": QUESTION.format(key),
        "answer": number,
        "max_new_tokens": 32,
    }
    for key, number in NUMBERS.items()
]

with TemporaryDirectory() as folder:
    data = Path(folder) / "own.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    records = kvfold.evaluate(model, tokenizer, "jsonl", ["snapkv", "kvzip"], [0.3], data=data)

# Every run includes four baselines: all, random entries, sinks and recent tokens, less context.
for record in records:
    kept, right = record["cell.budget"] or "all", record["score.value"]
    print(f"{record['cell.method']} keeps {kept}: {right:.0f} % right")
