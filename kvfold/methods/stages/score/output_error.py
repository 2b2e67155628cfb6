# SPDX-License-Identifier: Apache-2.0
"""How much leaving entries out changes a layer's attention output, for observed queries."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.methods.stages.score.observation_window import pool


def change_alone(observation: Observation, window: int, kernel: int) -> Tensor:
    """What leaving out each entry alone does to the outputs of the last `window` queries.

    Neighbours share the highest of it, `kernel` at a time: an answer is read on from where it was
    found.

    Without entry j, whose weight is a, an output o becomes (o − a·v) / (1 − a): it moves by about
    a·‖v − o‖. `[B, H, T]` float32, root of the squares summed over queries and a group's heads.
    """
    observation, order = observation.padding_first()  # what padding parts are neighbours
    rows = _grouped(observation.window_attention(window), observation)
    values = observation.values.float()
    outputs = rows @ values
    squared = values.square().sum(-1)[:, :, None] + outputs.square().sum(-1, keepdim=True)
    distance = (squared - 2 * outputs @ values.transpose(-1, -2)).clamp(min=0)
    change = (rows.square() * distance).sum(2).sqrt()
    scores = pool(change, kernel, "max", observation.positions < 0)
    return scores if order is None else torch.zeros_like(scores).scatter(2, order, scores)


def relative_change(observation: Observation, kept: Tensor, queries: slice) -> Tensor:
    """‖change‖ / ‖output‖ of the layer `[B]` when only `kept [B, H, T]` stay, over those queries.

    Outputs are the heads' attention outputs side by side, before the output projection.
    """
    rows = _grouped(observation.window_attention(observation.window)[:, :, queries], observation)
    values = observation.values.float()
    outputs = rows @ values
    staying = rows * kept[:, :, None]
    # What leaves gives its weight to the rest; an attention sink keeps its share.
    rest = (1 - (rows - staying).sum(-1, keepdim=True)).clamp(min=1e-6)
    change = staying @ values / rest - outputs
    return _norm(change) / _norm(outputs).clamp(min=1e-12)


def _norm(outputs: Tensor) -> Tensor:
    return outputs.square().sum((1, 2, 3)).sqrt()


def _grouped(rows: Tensor, observation: Observation) -> Tensor:
    """`[B, Hq, W, T]` → `[B, H, G·W, T]`."""
    grouped: Tensor = rows.unflatten(1, (observation.keys.shape[1], -1))
    return grouped.flatten(2, 3)
