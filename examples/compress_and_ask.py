# SPDX-License-Identifier: Apache-2.0
"""Compress a document once, ask it often: python examples/compress_and_ask.py [MODEL]"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import kvfold
from kvfold.loading import load

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NUMBERS = {"soft-bell": "2241461", "calm-river": "8305127"}
QUESTION = "What is the special magic number for {} mentioned in the provided text?"

# A hub id or a folder; without one, the small model that comes with kvfold.
model, tokenizer = load(sys.argv[1] if len(sys.argv) > 1 else "bundled")

needles = [f"One of the special magic numbers for {k} is: {n}. " for k, n in NUMBERS.items()]
document = NOISE * 12 + (NOISE * 12).join(needles) + NOISE * 12

# KVzip needs no question: it keeps the entries that the model needs to repeat the document.
context = kvfold.compress(model, tokenizer, document, method="kvzip", budget=0.3)

# A file of the kept entries, for later processes with the same model.
with TemporaryDirectory() as folder:
    path = Path(folder) / "numbers.kvfold"
    context.save(path)
    context = kvfold.load(path, model, tokenizer)

# Each question sees the document alone.
for key, number in NUMBERS.items():
    print(f"{key} ({number}): {context.ask(QUESTION.format(key), max_new_tokens=32)}")
