# SPDX-License-Identifier: Apache-2.0
"""Token pruning between layers (PyramidInfer)."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from kvfold.methods.observation import Observation

BLOCK = 128


def survivors(
    observation: Observation,
    *,
    least: float,
    recent: float,
    sinks: int,
    newest_weight: float,
    least_context: int,
    interval: int,
) -> Tensor:
    """Slots `[B, K]` of the tokens that the next layer computes, ascending, −1 for holes.

    The newest 1 + ⌊recent · n⌋ of a row's n tokens go on, and the first `sinks`. So does a share of
    the tokens before the newest, the context: those with most attention from the newest, mean over
    heads, where the newest query weighs `newest_weight` times the oldest. The share falls with
    depth from 1 to `least`. A context of at most `least_context` tokens is not pruned, and only
    every `interval`-th layer prunes.
    Source: PyramidInfer, arXiv 2405.12532, section 3; mutonix/pyramidinfer `modeling_llama.py`.
    """
    assert observation.tokens_seen is not None
    depth = (math.cos(math.pi * observation.layer / observation.layers) + 1) / 2
    part = (1 - least) * depth + least
    rows = []
    for row, tokens in enumerate(observation.tokens_seen.tolist()):
        slots = (observation.positions[row, 0] >= 0).nonzero()[:, 0]
        window = 1 + int(recent * tokens)
        context = len(slots) - window
        kept = int(context * part)
        floor = min(least_context, tokens - window)
        if context > floor and kept > floor and part < 1 and observation.layer % interval == 0:
            scores = _attention_of_newest(observation, row, window, newest_weight)[slots[:context]]
            scores[:sinks] = torch.inf
            best = scores.argsort(descending=True, stable=True)[:kept].sort().values
            slots = torch.cat([slots[best], slots[context:]])
        rows.append(slots)
    longest = max(map(len, rows))
    return torch.stack([torch.nn.functional.pad(r, (longest - len(r), 0), value=-1) for r in rows])


def _attention_of_newest(observation: Observation, row: int, window: int, weight: float) -> Tensor:
    """Weighted mean attention `[T]` of a row's last `window` queries, over all heads, in blocks."""
    one = slice(row, row + 1)
    assert observation.queries is not None and observation.query_positions is not None
    device = observation.keys.device
    weights = torch.linspace(1, weight, window, dtype=torch.float32, device=device)
    total = observation.keys.new_zeros(observation.keys.shape[2], dtype=torch.float32)
    for start in range(0, window, BLOCK):
        end = min(start + BLOCK, window)
        first = observation.queries.shape[2] - window
        block = dataclasses.replace(
            observation,
            keys=observation.keys[one],
            values=observation.values[one],
            positions=observation.positions[one],
            queries=observation.queries[one, :, first + start : first + end],
            query_positions=observation.query_positions[one, first + start : first + end],
            most_queries=None,  # a forward of its own shows all
        )
        attention = block.window_attention(end - start)[0].mean(0)
        total += weights[start:end] @ attention.float()
    return total / window
