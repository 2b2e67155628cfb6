# SPDX-License-Identifier: Apache-2.0
"""KVzip's rule as loops: the most attention of the repeating queries, and the best of all pairs."""

from __future__ import annotations

import torch

from tests.helpers.by_hand import Layer, best


def most_attention(
    layer: Layer,
    h: int,
    prefix: int,
    scored: range,
    new: int,
    inputs: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> list[float]:
    """Over all new queries of a group: softmax over the prefix, the part and the new entries.

    With the layer's `inputs [S, Dm]` and W_o, `output [Dm, Hq·Dv]`, times ‖W_o v‖ / ‖h‖ (KVzip+).
    """
    head = layer.heads[h]
    group = len(layer.query) // len(layer.heads)
    places = [*range(prefix), *scored, *range(len(head) - new, len(head))]
    later = torch.ones(new, new, dtype=torch.bool).triu(1)
    hidden = torch.cat([torch.zeros(new, len(places) - new, dtype=torch.bool), later], 1)
    most = torch.zeros(len(scored), dtype=torch.float64)
    for number in range(h * group, (h + 1) * group):
        logits = layer.query[number, -new:] @ head.keys[places].T * layer.scale
        rows = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        if inputs is not None and output is not None:
            size = head.values.shape[1]
            projected = head.values[places] @ output[:, number * size : (number + 1) * size].T
            rows = rows * projected.norm(dim=1) / inputs[-new:].norm(dim=1)[:, None]
        most = torch.maximum(most, rows[:, prefix : prefix + len(scored)].amax(0))
    return most.tolist()


def kept_by_score(
    scores: list[list[list[float]]], mean: int, prefix: int, options: str = ""
) -> list[list[list[int]]]:
    """Positions per layer and head: the prefix, and the best of all layers and heads."""
    every = [
        (-score, layer, head, token)
        for layer, heads in enumerate(scores)
        for head, tokens in enumerate(heads)
        for token, score in enumerate(tokens)
    ]
    heads = len(scores) * len(scores[0])
    total = min(mean * heads, len(every))
    kept = sorted(every)[:total]
    if options == "strict=true":
        kept = [pair for pair in kept if pair[0] < kept[-1][0]]
    if options == "level=uniform":
        kept = [
            (0.0, layer, head, token)
            for layer, of_heads in enumerate(scores)
            for head, tokens in enumerate(of_heads)
            for token in best(tokens, mean)
        ]
    if options == "level=head":
        order = sorted((-max(t), i, h) for i, hs in enumerate(scores) for h, t in enumerate(hs))
        whole = {(i, h) for _, i, h in order[: total // len(scores[0][0])]}
        kept = [pair for pair in every if pair[1:3] in whole]
    out = [[list(range(prefix)) for _ in of_heads] for of_heads in scores]
    for _, layer, head, token in kept:
        out[layer][head].append(prefix + token)
    return out
