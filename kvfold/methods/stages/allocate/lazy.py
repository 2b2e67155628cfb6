# SPDX-License-Identifier: Apache-2.0
"""Allocation by lazy layers, which attend to little but the first and last tokens (SimLayerKV).

Zhang et al., arXiv 2410.13846.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.pyramid import pyramid
from kvfold.methods.stages.select.forced import Forced

Mass = Callable[[Observation], Tensor]
Lazy = Callable[[Observation], Tensor]
Range = Literal["all", "bottom", "top"]
Strategy = Literal["lazy", "random", "random_bottom", "random_top", "pyramid"]
PYRAMID_BETA = 20  # PyramidKV's default


def mass_of_last_query(observation: Observation, *, sinks: int, window: int) -> Tensor:
    """Attention mass `[B]` of the newest query on the first `sinks` and the last `window` entries.

    The query's own entry is among them; mean over all query heads. SimLayerKV, equation 2.
    """
    edges = Forced(sinks=sinks, recent=window).mask(observation.positions, _stored(observation))
    row = observation.window_attention(1)[:, :, 0]
    edges = edges.repeat_interleave(row.shape[1] // edges.shape[1], 1)
    return (row * edges).sum(-1).mean(-1).clamp(max=1.0)


def mass_of_last_queries(observation: Observation, *, sinks: int, last: int, recent: int) -> Tensor:
    """Attention mass `[B]` of the last queries on the first tokens and on those just before each.

    The `recent` tokens before a query do not include its own; mean over `last` queries and all
    query heads. SimLayerKV, equation 1, as in the released prefill code.
    """
    assert observation.query_positions is not None
    rows: Tensor = observation.window_attention(last).unflatten(
        1, (observation.positions.shape[1], -1)
    )
    entries = observation.positions[:, :, None]
    queries = observation.query_positions[:, -last:]
    age = queries[:, None, :, None] - entries
    edges = (entries < sinks) | ((age >= 1) & (age <= recent))
    mass = (rows * edges[:, :, None]).sum(-1).mean((1, 2))
    return (mass.sum(-1) / (queries >= 0).sum(-1).clamp(min=1)).clamp(max=1.0)


def is_lazy(
    observation: Observation,
    mass: Mass,
    *,
    threshold: float,
    kept: int,
    keep_last_layer: bool = False,
) -> Tensor:
    """True `[B]` for rows in which this layer is lazy: its `mass` exceeds `threshold`.

    False if no more than the `kept` first and last entries are stored, where the mass says nothing,
    and for the last layer with `keep_last_layer`.
    """
    longer = _stored(observation) > kept
    if keep_last_layer and observation.layer == observation.layers - 1:
        return torch.zeros_like(longer)
    return longer & (mass(observation) > threshold)


def lazy_size(observation: Observation, lazy: Lazy, *, kept: int) -> Tensor:
    """Sizes `[B]`, entries per head: `kept` if the layer is `lazy`, else all stored entries."""
    return _stored(observation).masked_fill(lazy(observation), kept)


# --- the paper's baselines: the same number of entries, in other layers -------------------------


def laziness(observation: Observation, lazy: Lazy) -> Tensor:
    """Statistic of a layer for the functions below, int64 `[B, 3]`: lazy, entries stored, seed."""
    stored = _stored(observation)
    return torch.stack(
        [lazy(observation).long(), stored, torch.full_like(stored, observation.seed)], -1
    )


def random_layers(
    layers: list[Tensor], budget: Tensor, observation: Tensor, *, kept: int, among: Range = "all"
) -> list[Tensor]:
    """Sizes `[B]` of each layer: as many random layers keep `kept` entries as layers are lazy.

    layers: `laziness` of each; the other arguments are not used. `among` draws from all layers, the
    bottom half or the top half; a half with fewer layers is taken whole. One draw serves the batch:
    each row takes as many of its first layers as it needs. SimLayerKV, section 6.4.
    """
    lazy, stored, seed = _by_layer(layers)
    half = len(layers) // 2
    indices = torch.arange(len(layers))
    drawn = {"all": indices, "bottom": indices[:half], "top": indices[half:]}[among]
    generator = torch.Generator().manual_seed(int(seed[0, 0]))
    rank = torch.full((len(layers), 1), len(layers))
    rank[drawn, 0] = torch.randperm(len(drawn), generator=generator)
    trimmed = rank.to(lazy.device) < lazy.sum(0)
    return _as_counts(torch.where(trimmed, stored.clamp(max=kept), stored), layers)


def pyramid_layers(
    layers: list[Tensor], budget: Tensor, observation: Tensor, *, kept: int
) -> list[Tensor]:
    """Sizes `[B]` of each layer: as many entries in all as with lazy layers, falling with depth.

    layers: `laziness` of each; the other arguments are not used. The sizes are an arithmetic
    sequence, at least `kept` if so many are stored. SimLayerKV, section 6.4.
    """
    lazy, stored, _ = _by_layer(layers)
    totals = torch.where(lazy > 0, stored.clamp(max=kept), stored).sum(0)
    rows = [
        pyramid(total, most, len(layers), kept, PYRAMID_BETA)
        for total, most in zip(totals.tolist(), stored.amax(0).tolist(), strict=True)
    ]
    return _as_counts(torch.tensor(rows, device=stored.device).T, layers)


STRATEGIES: dict[str, Callable[..., list[Tensor]]] = {
    "random": random_layers,
    "random_bottom": partial(random_layers, among="bottom"),
    "random_top": partial(random_layers, among="top"),
    "pyramid": pyramid_layers,
}


def _by_layer(layers: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.stack([layer.to(layers[0].device) for layer in layers]).unbind(-1)


def _as_counts(counts: Tensor, layers: list[Tensor]) -> list[Tensor]:
    return [row.to(layer.device) for row, layer in zip(counts, layers, strict=True)]


def _stored(observation: Observation) -> Tensor:
    return (observation.positions >= 0).sum(-1).amax(-1)
