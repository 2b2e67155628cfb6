# SPDX-License-Identifier: Apache-2.0
"""KVzip's prefill with its scoring beside a plain prefill: `python benchmarks/reconstruction.py`.

A model of 8 layers, 8 query and 4 KV heads of 64, with random weights; interleaved, one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvfold
from kvfold.generation.generate import read_turn


def build() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=65536,
    )
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = build(), kvfold.bundled_model()[1]
    ids = torch.randint(3, 2048, (1, arguments.length))
    plain, scored = [], []
    for _ in range(arguments.rounds):
        began = time.perf_counter()
        model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
        plain.append(time.perf_counter() - began)
        cache = kvfold.CompressedCache(model, "kvzip", 0.2, tokenizer=tokenizer)
        began = time.perf_counter()
        read_turn(model, cache, ids, None, until=arguments.length, chunk=arguments.length)
        scored.append(time.perf_counter() - began)
        kvfold.disable(model)
    ratios = [b / a for a, b in zip(plain, scored, strict=True)]
    print(
        f"{arguments.length} tokens: {statistics.median(ratios):.2f} x a plain prefill "
        f"({min(ratios):.2f} to {max(ratios):.2f}); bytes {cache.stats().ratio:.3f}"
    )


if __name__ == "__main__":
    main()
