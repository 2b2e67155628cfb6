# SPDX-License-Identifier: Apache-2.0
"""The loss of one set of tokens for all layers and heads, where a method keeps one for each head.

`python -m docs.results.levelled.one_set [MODEL]`: attention of a prompt's last 32 queries, and the
error of the output, on Python's language reference.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.methods.stages.select.one_set import Rule
from kvfold.policies import policy, sharing_loss
from tests.helpers.engine import recorded

METHODS = ["snapkv", "rkv", "keydiff", "expected_attention", "snapkv + adakv"]
RULES: list[Rule] = ["mass", "votes", "union"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=".models/smollm2")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    text = "\n\n".join(topics.values())
    ids = AutoTokenizer.from_pretrained(arguments.model)(text, return_tensors="pt").input_ids
    prefill = recorded(model, ids[:, : arguments.tokens])
    print("| method | kept | rule | tokens | overlap | mass | own mass | error | own error |")
    for budget in arguments.budgets:
        for method in arguments.methods:
            kept = policy(method).keep(prefill, budget)
            for rule in RULES:
                loss = sharing_loss(kept, kept.shared(rule), prefill)
                print(
                    f"| `{method}` | {budget} | {rule} | {loss.shared} | {loss.overlap:.2f} "
                    f"| {loss.mass_shared:.3f} | {loss.mass_own:.3f} "
                    f"| {loss.error_shared:.2f} | {loss.error_own:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
