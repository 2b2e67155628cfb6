# SPDX-License-Identifier: Apache-2.0
"""Layers that attend to little but the first and the last tokens keep only those."""

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
PYRAMID_BETA = 20  # the shape of PyramidKV


def mass_of_last_query(observation: Observation, *, sinks: int, window: int) -> Tensor:
    """Attention `[B]` of the newest query, itself included, to the first and last entries.

    The first `sinks` tokens and the last `window` stored ones; mean over all query heads.
    (SimLayerKV, equation 2.)
    """
    edges = Forced(sinks=sinks, recent=window).mask(observation.positions, _stored(observation))
    row = observation.window_attention(1)[:, :, 0]
    edges = edges.repeat_interleave(row.shape[1] // edges.shape[1], 1)
    return (row * edges).sum(-1).mean(-1).clamp(max=1.0)


def mass_of_last_queries(observation: Observation, *, sinks: int, last: int, recent: int) -> Tensor:
    """Attention `[B]` of the last `last` queries to the first tokens and to those just before each.

    The `recent` ones before a query do not hold the query's own; mean over queries and query
    heads. (SimLayerKV, equation 1, as in the released prefill code.)
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
    """Which rows find this layer lazy, bool `[B]`: more `mass` at the edges than `threshold`.

    Never where no more than the `kept` entries at the edges are stored: the mass would say
    nothing there.
    """
    longer = _stored(observation) > kept
    if keep_last_layer and observation.layer == observation.layers - 1:
        return torch.zeros_like(longer)
    return longer & (mass(observation) > threshold)


def lazy_size(observation: Observation, lazy: Lazy, *, kept: int) -> Tensor:
    """Entries per head `[B]`: `kept` where the layer is `lazy`, everything elsewhere."""
    return _stored(observation).masked_fill(lazy(observation), kept)


# --- what the paper compares with: the same number of entries, in other layers ------------------


def laziness(observation: Observation, lazy: Lazy) -> Tensor:
    """What the functions below must know of a layer, int64 `[B, 3]`: lazy, entries stored, seed."""
    stored = _stored(observation)
    return torch.stack(
        [lazy(observation).long(), stored, torch.full_like(stored, observation.seed)], -1
    )


def random_layers(
    layers: list[Tensor], budget: Tensor, observation: Tensor, *, kept: int, among: Range = "all"
) -> list[Tensor]:
    """As many layers as are lazy, but drawn at random, keep `kept` entries: `[B]` of each layer.

    layers: `laziness` of each, whatever `budget` there is and was `seen`. `among` draws from all
    layers, the bottom half or the top half; where a half has fewer, all of it. The draw is one for
    the whole batch, each row taking its first ones. (SimLayerKV, section 6.4.)
    """
    lazy, stored, seed = _by_layer(layers)
    half = len(layers) // 2
    places = torch.arange(len(layers))
    drawn = {"all": places, "bottom": places[:half], "top": places[half:]}[among]
    generator = torch.Generator().manual_seed(int(seed[0, 0]))
    rank = torch.full((len(layers), 1), len(layers))
    rank[drawn, 0] = torch.randperm(len(drawn), generator=generator)
    trimmed = rank.to(lazy.device) < lazy.sum(0)
    return _as_counts(torch.where(trimmed, stored.clamp(max=kept), stored), layers)


def pyramid_layers(
    layers: list[Tensor], budget: Tensor, observation: Tensor, *, kept: int
) -> list[Tensor]:
    """As many entries as lazy layers would leave, in an arithmetic sequence that falls with depth.

    layers: `laziness` of each, whatever `budget` there is and was `seen`. Returns `[B]` of each
    layer, at least `kept` where so many are stored. (SimLayerKV, section 6.4.)
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
