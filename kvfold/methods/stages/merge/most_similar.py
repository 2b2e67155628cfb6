# SPDX-License-Identifier: Apache-2.0
"""D2O's merge: an evicted entry is merged into the most similar kept entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.kernels.gather import take
from kvfold.kernels.single_query import products
from kvfold.methods.stages.merge.base import Change, Eviction, Leaving, MergeStages
from kvfold.store.entry_norms import On, norms_of

Weights = Literal["softmax", "average", "official"]
Merging = Literal["softmax", "average", "official", "none"]
Similarity = Literal["keys", "values", "independent"]
Decide = Literal["head", "head_mean"]

TILE_BYTES = 16 * 2**20  # largest temporary tensor of similarities, or of evicted entries


def merging(
    weights: Merging, similarity: Similarity, beta: float, decide: Decide
) -> MergeStages | None:
    """Merge stage of a method; None if `weights` is "none".

    "independent" merges keys by keys and values by values, and one entry as many.
    """
    if weights == "none":
        return None
    options: dict[str, Any] = {"beta": beta, "weights": weights, "decide": decide}
    if similarity == "independent":
        return MergeStages(partial(merge_apart, **options))
    return MergeStages(
        partial(merge_similar, on=similarity, **options),
        partial(merge_one, on=similarity, **options),
        norms=similarity,
    )


def merge_similar(
    eviction: Eviction,
    *,
    beta: float = 0.7,
    on: On = "keys",
    weights: Weights = "softmax",
    decide: Decide = "head",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Kept keys `[B, H, K, D]` and values `[B, H, K, Dv]` after merging, and thresholds `[B, H]`.

    1. u is the highest cosine of an evicted entry with any kept one, of keys or of values (`on`).
    2. A head's threshold is the mean u of its first eviction, and later moves by `beta` towards
       the mean u of each eviction. It is NaN for a head that has not evicted yet.
    3. Evicted entries whose u reaches the moved threshold are merged into that kept entry, keys and
       values with the same weights. All others are lost.

    `weights`: "softmax" is equation 12, e for the kept entry and exp(u) for each evicted one,
    divided by their sum; "average" weighs all equally; "official" weighs 1 and u but divides by
    their number, so that merged entries shrink. `decide="head_mean"` compares the mean u of all
    heads' i-th evicted entries with one threshold, as the released code does.
    Source: D2O (arXiv 2406.13035), section 4.2.2, equations 9 to 12; AIoT-MLSys-Lab/d2o.
    """
    keys, values = take(eviction.keys, eviction.slots), take(eviction.values, eviction.slots)
    evicted = evicted_slots(eviction)
    if not evicted.shape[-1] or not eviction.slots.shape[-1]:
        return keys, values, eviction.state
    stored, kept = (eviction.keys, keys) if on == "keys" else (eviction.values, values)
    real = eviction.slots >= 0
    similarity, nearest = _nearest(stored, evicted, kept, real)
    candidates = (evicted >= 0) & real.any(-1, keepdim=True)
    merged, threshold = _reached(similarity, candidates, eviction.state, beta, decide)
    merge = _Merge(evicted, nearest, merged, _exact(similarity, keys), weights)
    return merge.into(keys, eviction.keys), merge.into(values, eviction.values), threshold


def merge_apart(
    eviction: Eviction, *, beta: float = 0.7, weights: Weights = "softmax", decide: Decide = "head"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `merge_similar`, but keys merge by cosines of keys, and values by cosines of values.

    An entry's key and value may merge into different entries, or one of them into none. Thresholds
    `[B, H, 2]` are of keys and of values. D2O, Table 9.
    """
    before = (None, None) if eviction.state is None else eviction.state.unbind(-1)
    apart = partial(merge_similar, beta=beta, weights=weights, decide=decide)
    keys, _, of_keys = apart(replace(eviction, state=before[0]), on="keys")
    _, values, of_values = apart(replace(eviction, state=before[1]), on="values")
    if of_keys is None or of_values is None:
        return keys, values, None
    return keys, values, torch.stack([of_keys, of_values], -1)


def merge_one(
    leaving: Sequence[Leaving],
    *,
    beta: float = 0.7,
    on: On = "keys",
    weights: Weights = "softmax",
    decide: Decide = "head",
) -> list[Change]:
    """`merge_similar` of the one entry that each head of each layer evicts while decoding."""
    nearest, found = [], []
    for each in leaving:
        highest, norm, slot = _nearest_to_one(each.keys if on == "keys" else each.values, each)
        nearest.append(slot)
        state = each.state
        before = torch.full_like(highest[..., 0], torch.nan) if state is None else state
        both = _entries(each.keys, each.values, torch.cat([each.slot, slot], 2))
        found.append((highest, norm, before, *both))
    # One entry per head: all layers are computed together.
    highest, norm, before, of_keys, of_values = map(torch.cat, zip(*found, strict=True))
    (own_key, kept_key), (own_value, kept_value) = of_keys.split(1, 2), of_values.split(1, 2)
    similarity, before = highest.div_(norm).clamp_(max=1.0), before[..., None]
    judged = similarity
    if decide == "head_mean":
        judged = _head_mean(similarity, torch.ones_like(similarity, dtype=torch.bool))
    moved = torch.lerp(before, judged, beta)
    threshold = moved.where(before == before, judged)  # NaN: there was none
    merged = (judged >= threshold)[..., None]
    similarity = _exact(similarity, own_key)[..., None]
    if weights == "softmax":
        share = (similarity - 1).sigmoid_().mul_(merged)
    else:
        share = merged.to(similarity.dtype).mul_(0.5)
        if weights == "official":
            own_key, own_value = own_key * similarity, own_value * similarity
    keys, values = _blended(kept_key, own_key, share), _blended(kept_value, own_value, share)
    changed = [keys, values, threshold.squeeze(-1)]
    if leaving[0].norms is not None:
        changed.append(norms_of(keys if on == "keys" else values))
    return list(map(Change, nearest, *[of_all.chunk(len(leaving)) for of_all in changed]))


def _blended(kept: Tensor, evicted: Tensor, share: Tensor) -> Tensor:
    """Mix `[B, H, 1, D]` of the kept entry and a `share [B, H, 1, 1]` of the evicted one."""
    exact = share.dtype
    return torch.lerp(kept.to(exact), evicted.to(exact), share).to(kept.dtype)


def _exact(similarity: Tensor, entries: Tensor) -> Tensor:
    """Similarities in the precision in which entries are summed, as weights must have it too."""
    return similarity.to(torch.promote_types(entries.dtype, torch.float32))


def _entries(keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and the values at `slots [B, H, n]`."""
    size = keys.shape[3]
    index = _wide(slots, keys)
    same = size == values.shape[-1]
    return keys.gather(2, index), values.gather(2, index if same else _wide(slots, values))


def _reached(
    similarity: Tensor, candidates: Tensor, state: Tensor | None, beta: float, decide: Decide
) -> tuple[Tensor, Tensor]:
    """Bool mask `[B, H, E]` of the candidates to merge, and the moved thresholds `[B, H]`."""
    judged, counted = similarity, candidates
    if decide == "head_mean":
        judged = _head_mean(similarity, candidates)
        counted = candidates.any(1, keepdim=True).expand_as(candidates)
    threshold = _threshold(judged, counted, state, beta)
    return candidates & (judged >= threshold[..., None]), threshold


def evicted_slots(eviction: Eviction) -> Tensor:
    """Slots `[B, H, E]` of evicted entries, ascending; −1 on the left in heads that evict fewer."""
    slots, positions = eviction.slots, eviction.positions
    stored = positions.shape[-1]
    # Holes write into an extra slot, which is cut off.
    gone = F.pad(positions >= 0, (0, 1)).scatter(2, slots.where(slots >= 0, stored), False)
    gone = gone[..., :stored].byte()
    counts = gone.sum(-1, keepdim=True)
    most = int(counts.max()) if stored else 0
    if most == 1:
        return gone.argmax(-1, keepdim=True).masked_fill(counts == 0, -1)
    order = gone.argsort(dim=-1, stable=True)[..., stored - most :]
    surplus = torch.arange(most, device=slots.device) < most - counts
    return order.masked_fill(surplus, -1)


def _wide(slots: Tensor, entries: Tensor) -> Tensor:
    return slots[..., None].expand(-1, -1, -1, entries.shape[-1])


def _nearest(stored: Tensor, evicted: Tensor, kept: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Highest cosine of each evicted entry, and the index of the first kept entry that has it.

    Both `[B, H, E]`. stored `[B, H, T, D]`, evicted slots `[B, H, E]`, kept `[B, H, K, D]`; holes
    among the kept are false in `real [B, H, K]`.
    """
    others = F.normalize(kept.float(), dim=-1).transpose(-1, -2)
    # Added: filling by a mask takes a CPU nine times as long.
    holes = torch.zeros_like(real, dtype=others.dtype).masked_fill_(~real, -torch.inf)[:, :, None]
    best = []
    for part in evicted.split(_per_tile(real.numel()), -1):
        cosines = F.normalize(take(stored, part).float(), dim=-1) @ others
        best.append(cosines.add_(holes).max(-1))
    similarity, nearest = zip(*best, strict=True)
    # Rounding must not lift an evicted entry above the kept one's similarity to itself.
    return torch.cat(similarity, -1).clamp(max=1.0), torch.cat(nearest, -1)


def _nearest_to_one(stored: Tensor, leaving: Leaving) -> tuple[Tensor, Tensor, Tensor]:
    """As `_nearest` of the one evicted entry, among entries not hidden; all `[B, H, 1]`.

    Its highest cosine times its norm, that norm, and the slot that has the cosine.
    """
    norms = norms_of(stored) if leaving.norms is None else leaving.norms
    along = leaving.products
    if along is None:
        own, entries = stored.gather(2, _wide(leaving.slot, stored)).float(), stored.float()
        along = products(own.flatten(0, 1), entries.flatten(0, 1), None, 1.0).view(norms.shape)
    highest, nearest = (along + leaving.hidden.float()).div_(norms).max(-1, keepdim=True)
    return highest, norms.gather(2, leaving.slot), nearest


def _per_tile(numbers: int) -> int:
    """Evicted entries per tile, if each takes `numbers` float32 numbers."""
    return max(1, TILE_BYTES // (4 * max(1, numbers)))


def _head_mean(similarity: Tensor, candidates: Tensor) -> Tensor:
    total = similarity.double().masked_fill(~candidates, 0.0).sum(1, keepdim=True)
    mean = total / candidates.sum(1, keepdim=True)
    return mean.float().expand_as(similarity)


def _threshold(judged: Tensor, counted: Tensor, before: Tensor | None, beta: float) -> Tensor:
    """Thresholds `[B, H]`, float32, by equation 10; unchanged (or NaN) if a head evicts nothing."""
    counts = counted.sum(-1)
    # In float64, so that equal similarities reach their own mean.
    mean = judged.double().masked_fill(~counted, 0.0).sum(-1) / counts
    old = mean if before is None else torch.where(before.isnan(), mean, before.double())
    return torch.where(counts > 0, beta * mean + (1 - beta) * old, old).float()


@dataclass(frozen=True)
class _Merge:
    """Merge of evicted entries into kept ones; all tensors `[B, H, E]`."""

    evicted: Tensor  # slots, −1 for none
    nearest: Tensor  # index of the most similar kept entry
    merged: Tensor  # bool: the evicted entry is merged, else lost
    similarity: Tensor  # cosine with that kept entry
    weights: Weights

    def into(self, kept: Tensor, stored: Tensor) -> Tensor:
        """`kept [B, H, K, D]` with the merged entries of `stored [B, H, T, D]` added."""
        return self._added(kept, stored, self.nearest.where(self.merged, kept.shape[2]))

    def _added(self, kept: Tensor, stored: Tensor, targets: Tensor) -> Tensor:
        """Weighted means `[B, H, K, D]`; `targets [B, H, E]` index kept entries, K: not merged."""
        batch, heads, size, width = kept.shape
        exact = self.similarity.dtype
        own, each, counted = self._weights()
        sums = F.pad(own * kept.to(exact), (0, 0, 0, 1))
        step = _per_tile(batch * heads * width)
        tiles = (t.split(step, -1) for t in (self.evicted, targets, each))
        for part, target, weight in zip(*tiles, strict=True):
            entries = take(stored, part).to(exact) * weight[..., None]
            sums.scatter_add_(2, _wide(target, kept), entries)
        total = kept.new_full((batch, heads, size + 1), own, dtype=torch.float64)
        total = total.scatter_add(2, targets, counted.double()).to(exact)
        touched = torch.zeros_like(total, dtype=torch.bool).scatter(2, targets, True)
        blended = (sums / total[..., None])[:, :, :size].to(kept.dtype)
        return torch.where(touched[..., :size, None], blended, kept)

    def _weights(self) -> tuple[float, Tensor, Tensor]:
        """Weight of the kept entry, weights of evicted ones, and what these add to the divisor."""
        equal = torch.ones_like(self.similarity)
        if self.weights == "softmax":
            return math.e, self.similarity.exp(), self.similarity.exp()
        return 1.0, equal if self.weights == "average" else self.similarity, equal
