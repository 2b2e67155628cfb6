# SPDX-License-Identifier: Apache-2.0
"""Blocks of vLLM that contexts take, beside those of the text.

usage: python -m benchmarks.vllm_blocks MODEL BOOK [--budget 0.2] [METHOD ...]

Two parts of the book, of 4,200 characters each. A block holds pages of any layer and head. The
second figure is what blocks would be where each holds pages of one layer, as many of each layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvfold
from kvfold.serve.vllm.head_pages.layout import HeadPages

CHARACTERS, STARTS, BLOCK = 4200, (20000, 60000), 32
METHODS = ["snapkv", "adakv", "pyramidkv", "kvzip"]


def main() -> None:
    """Prints a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("book", type=Path)
    parser.add_argument("methods", nargs="*", default=METHODS)
    parser.add_argument("--budget", type=float, default=0.2)
    asked = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(asked.model).eval()
    tokenizer, book = AutoTokenizer.from_pretrained(asked.model), asked.book.read_text()
    for method in asked.methods:
        found = []
        for start in STARTS:
            text = book[start : start + CHARACTERS]
            context = kvfold.compress(model, tokenizer, text, f"{method} + pages", asked.budget)
            seen = context.ids.shape[1]
            rest = seen % BLOCK
            kept = [[count - rest for count in layer[0]] for layer in context.stats().kept]
            pages = HeadPages.of(kept, BLOCK)
            assert pages is not None
            apart = max(-(-sum(layer) // len(layer)) for layer in pages.of_layers)
            found.append([(blocks * BLOCK + rest) / seen for blocks in (pages.blocks(), apart)])
        own, alone = (", ".join(f"{each[i]:.2f}" for each in found) for i in range(2))
        print(f"{method}: {own} of the text's blocks; {alone} layer by layer", flush=True)


if __name__ == "__main__":
    main()
