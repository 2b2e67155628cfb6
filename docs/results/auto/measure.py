# SPDX-License-Identifier: Apache-2.0
"""Predicted and measured errors of `auto` on the bundled model.

`python -m docs.results.auto.measure` prints them.

Held-out errors are those of the queries just before the observed ones. Actual errors compare the
attention outputs of the compressed cache with those of a full one, on tokens read afterwards.
"""

from __future__ import annotations

import argparse
import random
import statistics
from functools import partial

import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.eval import short_ruler
from kvfold.hf.chat_template import PromptFrame, token_count, token_ids

TOLERANCES = (0.01, 0.02, 0.05, 0.1, 0.2)


def outputs(
    model: PreTrainedModel, cache: kvfold.CompressedCache, ids: torch.Tensor
) -> list[torch.Tensor]:
    """Attention output of each layer for new tokens, before the projection, `[S, hidden]`."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
        for layer in model.model.layers
    ]
    with torch.no_grad(), cache.frozen():
        model(ids, past_key_values=cache, use_cache=True)
        cache.crop(-ids.shape[1])
    for hook in hooks:
        hook.remove()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--length", type=int, default=1024)
    arguments = parser.parse_args()
    model, tokenizer = kvfold.bundled_model()
    frame = PromptFrame.of(tokenizer)
    count = partial(token_count, tokenizer)
    layers = range(model.config.num_hidden_layers)
    print("| tolerance | question | entries kept | " + " | ".join(f"layer {i}" for i in layers))
    for aware in (False, True):
        for tolerance in TOLERANCES:
            rows: list[list[list[float]]] = [[[] for _ in layers] for _ in range(3)]
            kept, rng = [], random.Random(0)
            for _ in range(arguments.documents):
                sample = short_ruler.generate("multikey", arguments.length, count, rng)
                question = sample.questions[0]
                ending = token_ids(tokenizer, f"\n{question.text}{frame.after}{question.prefix}")
                answer = token_ids(tokenizer, f" {question.answers[0]}.")
                read = token_ids(tokenizer, frame.before + sample.document)
                asked = ending
                if aware:
                    read, asked = torch.cat([read, ending], 1), answer
                full = kvfold.CompressedCache(model, "full")
                small = kvfold.CompressedCache(model, f"auto:tolerance={tolerance},measure=true")
                with torch.no_grad():
                    for cache in (full, small):
                        model(read, past_key_values=cache, use_cache=True, logits_to_keep=1)
                stats = small.stats()
                kept.append(stats.kept_fraction)
                pairs = zip(outputs(model, full, asked), outputs(model, small, asked), strict=True)
                for layer, (a, b) in enumerate(pairs):
                    rows[0][layer].append(stats.errors[layer][0])
                    rows[1][layer].append(stats.errors[layer][1])
                    rows[2][layer].append(((a - b).norm() / a.norm()).item())
            cells = [
                " / ".join(f"{statistics.mean(kind[layer]):.3f}" for kind in rows)
                for layer in layers
            ]
            view = "in view" if aware else "unknown"
            print(f"| {tolerance} | {view} | {statistics.mean(kept):.2f} | " + " | ".join(cells))


if __name__ == "__main__":
    main()
