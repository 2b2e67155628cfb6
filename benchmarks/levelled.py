# SPDX-License-Identifier: Apache-2.0
"""How far answers move when all heads keep one set of tokens in place of their own.

`python -m benchmarks.levelled [MODEL]`: mean KL of next tokens along an answer over Python's
language reference; to the heads' own sets, and of both to the whole text.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvfold
from kvfold.contexts.levelled import QUESTION, distance

METHODS = ["kvzip", "adakv", "pyramidkv"]
RULES = ["mass", "votes", "union"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=".models/smollm2")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--budget", type=float, default=0.3)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    text = "\n\n".join(topics.values())
    ids = tokenizer(text, add_special_tokens=False).input_ids[: arguments.tokens]
    document = tokenizer.decode(ids)
    full = kvfold.compress(model, tokenizer, document, "full")
    asked = full.chat()._question_ids(QUESTION, "", special_tokens=False)
    print("| method | rule | tokens | KL to own sets | own sets' KL to all | KL to all |")
    for method in arguments.methods:
        own = kvfold.compress(model, tokenizer, document, method, arguments.budget)
        before, _ = distance(full, own.cache, asked)
        for rule in RULES:
            made = own.levelled(rule)
            after, _ = distance(full, made.cache, asked)
            assert made.level is not None
            print(
                f"| `{method}` | {rule} | {made.level.tokens} of {full.ids.shape[1]} "
                f"| {made.level.kl:.3f} | {before:.3f} | {after:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
