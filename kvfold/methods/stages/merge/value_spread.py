# SPDX-License-Identifier: Apache-2.0
"""CaM's merge: the value of an evicted entry is spread over the kept entries after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.kernels.gather import pick, take
from kvfold.methods.stages.merge.base import Eviction
from kvfold.methods.stages.merge.most_similar import evicted_slots

TILE_BYTES = 16 * 2**20  # largest temporary tensor of evicted values
# SplitMix64's step and multipliers, as signed integers
STEP, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def spread_values(
    eviction: Eviction, *, targets: int = 32, deterministic: bool = False, newest: int = 0
) -> tuple[Tensor, Tensor, None]:
    """Kept keys `[B, H, K, D]`, unchanged, and values `[B, H, K, Dv]` with evicted values added.

    An evicted entry's targets are the next `targets` kept entries by position, or all m that follow
    if fewer; without any it is lost. With column sums A, p = clamp(A of the entry / mean A of its
    targets, 0, 1), where 0/0 is 0. Each target's value gains M·v/m with M ~ Bernoulli(p) per head,
    or with `deterministic` the expectation p·v/m. M depends on the seed, the head and the evicted
    entry's position only. `newest` spreads only that many of the latest entries evicted from each
    head; 0 spreads all.
    Source: CaM (Zhang et al., ICML 2024); zyxxmu/cam `kv_cache_cam.py`, which spreads the newest.
    """
    keys, values = take(eviction.keys, eviction.slots), take(eviction.values, eviction.slots)
    evicted = evicted_slots(eviction)[..., -newest:]
    kept = values.shape[2]
    if not evicted.shape[-1] or not kept:
        return keys, values, None
    # Ascending, holes on the left: the kept entries after a position are a span.
    kept_positions = pick(eviction.positions, eviction.slots, -1)
    positions = pick(eviction.positions, evicted, 0)
    first = torch.searchsorted(kept_positions, positions)
    last = (first + targets).clamp(max=kept)
    weight = _chances(eviction, evicted, first, last)
    if not deterministic:
        weight = (_uniform(eviction.seed, positions) < weight).double()
    weight = weight.masked_fill(evicted < 0, 0.0) / (last - first).clamp(min=1)
    add = _to_one_span if evicted.shape[-1] == 1 else _to_spans
    return keys, add(values, eviction.values, evicted, weight, first, last), None


def _chances(eviction: Eviction, evicted: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Probabilities p `[B, H, E]`, float64; targets are the kept entries `first` to `last − 1`."""
    assert eviction.column_sums is not None
    sums = eviction.column_sums.double()
    before = F.pad(pick(sums, eviction.slots, 0).cumsum(-1), (1, 0))
    mean = (before.gather(2, last) - before.gather(2, first)) / (last - first)
    ratio = sums.gather(2, evicted.clamp(min=0)) / mean
    return ratio.nan_to_num(nan=0.0).clamp(0, 1)


def _weighted(values: Tensor, evicted: Tensor, weight: Tensor, exact: torch.dtype) -> Tensor:
    added = take(values, evicted).to(exact) * weight[..., None].to(exact)
    return added.masked_fill(weight[..., None] == 0, 0.0)


def _to_one_span(
    kept: Tensor, values: Tensor, evicted: Tensor, weight: Tensor, first: Tensor, last: Tensor
) -> Tensor:
    """Kept values after one evicted entry per head: only its span is written."""
    exact = torch.promote_types(kept.dtype, torch.float32)
    width = int((last - first).max())
    # Near the end the span is moved to the left, so that no slot is written twice.
    span = torch.arange(width, device=kept.device) + first.clamp(max=kept.shape[2] - width)
    inside = (span >= first) & (span < last)
    chosen = take(kept, span)
    changed = (chosen.to(exact) + _weighted(values, evicted, weight, exact)).to(kept.dtype)
    changed = torch.where(inside[..., None], changed, chosen)
    return kept.scatter(2, span[..., None].expand_as(chosen), changed)


def _to_spans(
    kept: Tensor, values: Tensor, evicted: Tensor, weight: Tensor, first: Tensor, last: Tensor
) -> Tensor:
    """Kept values after several: running sums, to which a span's first entry adds its value.

    The entry after its last one subtracts it again.
    """
    batch, heads, size, width = kept.shape
    # Both must cancel: sums are float64, and a count of open spans tells where none is left.
    gain = kept.new_zeros((batch, heads, size + 1, width), dtype=torch.float64)
    active = torch.zeros((batch, heads, size + 1), dtype=torch.long, device=kept.device)
    step = max(1, TILE_BYTES // (8 * batch * heads * width))
    for part in range(0, evicted.shape[-1], step):
        tile = slice(part, part + step)
        added = _weighted(values, evicted[..., tile], weight[..., tile], torch.float64)
        for edge, sign in ((first, 1), (last, -1)):
            index = edge[..., tile]
            gain.scatter_add_(2, index[..., None].expand_as(added), sign * added)
            active.scatter_add_(2, index, sign * (weight[..., tile] > 0).long())
    changed = (kept.double() + gain.cumsum(2)[:, :, :size]).to(kept.dtype)
    return torch.where((active.cumsum(-1)[..., :size] > 0)[..., None], changed, kept)


def _uniform(seed: int, positions: Tensor) -> Tensor:
    """Random numbers in [0, 1) `[B, H, E]`, float64, fixed by the seed, the head and the position.

    A hash instead of a generator: no other position's number has to be drawn first.
    """
    heads = torch.arange(positions.shape[1], device=positions.device)
    per_head = _mixed(_mixed(torch.full_like(heads, seed)) + heads)
    mixed = _mixed(per_head[:, None] + positions.long())
    return ((mixed >> 11) & (2**53 - 1)).double() / 2**53


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's output for state `x`, int64 (Steele, Lea and Flood, 2014)."""
    x = (x + 1) * STEP
    for shift, factor in ((30, FIRST), (27, SECOND)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return x ^ ((x >> 31) & (2**33 - 1))
