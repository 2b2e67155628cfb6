# SPDX-License-Identifier: Apache-2.0
"""Allocation by one ranking of entries over all layers and heads (KVzip)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import ROUNDING
from kvfold.methods.stages.select.top import highest


def candidates_of(observation: Observation, score: Callable[[Observation], Tensor]) -> Tensor:
    """Scores `[B, H, T]`, +∞ at forced entries and −∞ at padding and in the prefix."""
    scores, candidates = score(observation), observation.candidates
    return scores if candidates is None else scores.where(candidates == 0, candidates)


def pooled(
    scores: list[Tensor],
    per_head: Tensor,
    seen: Tensor | None = None,
    *,
    strict: bool = False,
    floor: float = 0.0,
) -> list[Tensor]:
    """Sizes int64 `[B, H]` of each layer: the number of a row's best entries in each head.

    scores: `[B, H, T]` of each layer, −inf for entries that are no candidates; `per_head [B]` is
    the mean size over layers and heads, possibly fractional. Sizes add up to `per_head` times all
    heads, rounded down, or to all candidates if these are fewer. Of equal scores the earlier layer,
    head and entry wins. `strict` keeps only scores above the last of these, as the official code
    does: one entry less without ties, and fewer with them. Every head keeps at least the part
    `floor` of the mean size, if it has as many candidates. `seen` is not used.

    Source: Kim et al., section 3 (arXiv 2505.23416); snu-mllab/KVzip `attention/score.py`.
    """
    if floor:
        least = (floor * per_head + ROUNDING).long()
        best = [highest(layer, least) & (layer > -torch.inf) for layer in scores]
        scores = [
            torch.where(kept, torch.inf, each) for kept, each in zip(best, scores, strict=True)
        ]
    pool = together([layer.flatten(1) for layer in scores])
    candidates = (pool > -torch.inf).sum(-1)
    total = torch.minimum((per_head * _heads(scores) + ROUNDING).long(), candidates)
    ordered, order = pool.sort(dim=-1, descending=True, stable=True)
    if strict:
        last = ordered.gather(1, (total - 1).clamp(min=0)[:, None])
        above = (pool > last) | ((pool > -torch.inf) & (total == candidates)[:, None])
    else:
        first = torch.arange(pool.shape[-1], device=pool.device) < total[:, None]
        above = torch.zeros_like(first).scatter(1, order, first)
    parts = apart(above, scores, [layer[0].numel() for layer in scores])
    return [part.view_as(layer).sum(-1) for part, layer in zip(parts, scores, strict=True)]


def whole_heads(scores: list[Tensor], per_head: Tensor, seen: Tensor | None = None) -> list[Tensor]:
    """Sizes `[B, H]` of each layer: heads with the highest maxima keep all candidates, others none.

    Shapes as in `pooled`. As many heads are kept as fit into `per_head` times all heads; of equal
    ones the earlier. Entries scored +inf stay in every head and do not count as its maximum. `seen`
    is not used.
    """
    open_ = [layer.isfinite() for layer in scores]
    forced = together([(layer == torch.inf).sum(-1) for layer in scores])
    best = [
        layer.masked_fill(~is_open, -torch.inf).amax(-1)
        for layer, is_open in zip(scores, open_, strict=True)
    ]
    candidates = together([is_open.sum(-1) for is_open in open_])
    order = together(best).argsort(dim=-1, descending=True, stable=True)
    room = per_head * _heads(scores) - forced.sum(-1)
    fits = candidates.gather(1, order).cumsum(-1) <= room[:, None]
    kept = torch.zeros_like(fits).scatter(1, order, fits)
    counts = forced + candidates * kept
    return apart(counts, scores, [layer.shape[1] for layer in scores])


def together(layers: list[Tensor]) -> Tensor:
    """Layers `[B, …]`, on several devices perhaps, joined along axis 1 on the first one's."""
    return torch.cat([layer.to(layers[0].device) for layer in layers], 1)


def apart(joined: Tensor, layers: list[Tensor], widths: list[int]) -> list[Tensor]:
    """Each layer's own part of axis 1, of its width, on its device."""
    parts = joined.split(widths, 1)
    return [part.to(layer.device) for part, layer in zip(parts, layers, strict=True)]


def _heads(scores: list[Tensor]) -> int:
    return sum(layer.shape[1] for layer in scores)
