# SPDX-License-Identifier: Apache-2.0
"""Change of a layer's attention output by evictions, for the window queries (auto)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.methods.stages.score.observation_window import pool


def change_alone(observation: Observation, window: int, kernel: int) -> Tensor:
    """Change `[B, H, T]`, float32, of the last `window` queries' outputs by each entry's eviction.

    Without entry j of weight a and value v, an output o becomes (o − a·v) / (1 − a): it moves by
    about a·‖v − o‖. Root of the squares summed over queries and a group's heads, max-pooled over
    `kernel` neighbours, so that the text around an important token is kept too.
    """
    observation, order = observation.padding_first()  # so that it separates no neighbours
    rows = _grouped(observation.window_attention(window), observation)
    values = observation.values.float()
    outputs = rows @ values
    squared = values.square().sum(-1)[:, :, None] + outputs.square().sum(-1, keepdim=True)
    distance = (squared - 2 * outputs @ values.transpose(-1, -2)).clamp(min=0)
    change = (rows.square() * distance).sum(2).sqrt()
    scores = pool(change, kernel, "max", observation.positions < 0)
    return scores if order is None else torch.zeros_like(scores).scatter(2, order, scores)


def relative_change(observation: Observation, kept: Tensor, queries: slice) -> Tensor:
    """Relative change ‖change‖ / ‖output‖ `[B]` of the layer if only `kept [B, H, T]` stay.

    Over the window queries in the slice `queries`. Outputs are the heads' attention outputs
    concatenated, before the output projection.
    """
    rows = _grouped(observation.window_attention(observation.window)[:, :, queries], observation)
    values = observation.values.float()
    outputs = rows @ values
    staying = rows * kept[:, :, None]
    # Evicted entries give their weight to the rest; sink logits keep theirs.
    rest = (1 - (rows - staying).sum(-1, keepdim=True)).clamp(min=1e-6)
    change = staying @ values / rest - outputs
    return _norm(change) / _norm(outputs).clamp(min=1e-12)


def _norm(outputs: Tensor) -> Tensor:
    return outputs.square().sum((1, 2, 3)).sqrt()


def _grouped(rows: Tensor, observation: Observation) -> Tensor:
    """Rows of a group under its KV head: `[B, Hq, W, T]` → `[B, H, G·W, T]`."""
    grouped: Tensor = rows.unflatten(1, (observation.keys.shape[1], -1))
    return grouped.flatten(2, 3)
