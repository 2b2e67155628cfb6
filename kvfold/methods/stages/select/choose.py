# SPDX-License-Identifier: Apache-2.0
"""Choice of the entries to keep, or of the one to evict, from a layer's observation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.methods.base import Stages
from kvfold.methods.observation import Observation
from kvfold.methods.stages.select.top import kept_mask, lowest, top, with_forced


@dataclass(frozen=True)
class Chosen:
    """Entries that a layer keeps."""

    slots: Tensor  # [B, H, K], ascending, −1 for holes
    over_budget: bool  # True if more entries are forced than the budget allows
    scores: Tensor  # [B, H, T], of all entries, forced or not
    forced: Tensor  # bool [B, H, T], entries that stay whatever their score

    def to(self, device: torch.device) -> Chosen:
        """The same on a device."""
        slots, scores, forced = (x.to(device) for x in (self.slots, self.scores, self.forced))
        return Chosen(slots, self.over_budget, scores, forced)


def choose(
    stages: Stages,
    observation: Observation,
    positions: Tensor,
    forced: Tensor,
    counts: Tensor,
    sizes: Tensor | None = None,
    beside: Tensor | None = None,
) -> Chosen:
    """Slots of the entries to keep.

    `positions [B, H, T]`, −1 for padding; `forced [B, H, T]` entries are kept as well as
    those that the method forces; `counts`, `[B]` or `[B, H]`, are the entries to keep, forced ones
    included. `sizes [B, H]` replaces what the heads stage would give, −1 where it decides;
    `beside [B, H, T]` entries are kept and do not count. Raises KvfoldError as `scores_of`, and for
    scores that are NaN.
    """
    per_row = counts if counts.dim() == 1 else counts.amax(-1)
    counted = positions if beside is None else positions.masked_fill(beside, -1)
    forced = forced | stages.forced.mask(counted, per_row)
    taken = forced if beside is None else forced | beside
    evictable = per_observed_head(~taken & (positions >= 0), observation)
    observation = dataclasses.replace(observation, budget=per_row, evictable=evictable)
    scores = scores_of(stages, observation, positions.shape[1])
    check_numbers(stages, scores.masked_fill(positions < 0, 0))
    if beside is not None:
        forced = forced | beside
        counts = counts.view(len(counts), -1) + beside.sum(-1)
    needed = forced.sum(-1)
    counts = counts.view(len(counts), -1).expand_as(needed)
    over = bool((needed > counts).any())
    if stages.heads is not None:
        open_ = scores.masked_fill(forced | (positions < 0), -torch.inf)
        shared = stages.heads(open_, (counts - needed).clamp(min=0).amin(-1))
        _check_head_sizes(stages, shared, needed.shape)
        counts = needed + shared
        if sizes is not None:
            counts = torch.where(sizes < 0, counts, sizes)
    counts = torch.minimum(torch.maximum(counts, needed), (positions >= 0).sum(-1))
    if stages.select is not None:
        forced = forced & (positions >= 0)
        slots = _selected(stages, observation, scores, forced, positions, counts, beside)
    else:
        slots = top(with_forced(scores, forced, positions), counts)
    return Chosen(slots, over, scores, forced)


def _selected(
    stages: Stages,
    observation: Observation,
    scores: Tensor,
    forced: Tensor,
    positions: Tensor,
    counts: Tensor,
    beside: Tensor | None,
) -> Tensor:
    """Slots of the select stage, which sees only what counts in the budget, and those `beside`."""
    assert stages.select is not None
    if beside is not None:
        forced, counts = forced & ~beside, counts - beside.sum(-1)
    counted = positions if beside is None else positions.masked_fill(beside, -1)
    chosen = stages.select(observation, scores, forced, counted, counts)
    _check_slots(stages, chosen, forced, counts)
    if beside is None:
        return chosen
    kept = beside | kept_mask(chosen, positions.shape[2])
    return top(with_forced(scores, kept, positions), kept.sum(-1))


def leaving(
    stages: Stages,
    observation: Observation,
    positions: Tensor,
    forced: Tensor | None,
    capacity: Tensor,
) -> tuple[Tensor, Tensor]:
    """Slot to evict in heads that store one entry more than `capacity [B]`, and its score.

    Both `[B, H, 1]`; a NaN anywhere among a head's scores shows in its own, for `check_numbers`.
    positions and forced `[B, H, T]` as for `choose`, which would keep all other slots. The
    observation holds the budget.
    """
    stay = staying(stages, positions, forced, capacity)
    return lowest(_scores_beside(stages, observation, stay))


def staying(stages: Stages, positions: Tensor, forced: Tensor | None, capacity: Tensor) -> Tensor:
    """Bool mask `[B, H, T]` of the slots that `leaving` does not evict: forced ones, and holes."""
    stay = positions < 0
    if stages.forced:
        stay = stay | stages.forced.mask(positions, capacity)
    return stay if forced is None else stay | forced


def leaving_beside(stages: Stages, observation: Observation, stay: Tensor) -> Tensor:
    """Slot `[B, H, 1]` as of `leaving`, where `stay [B, H, T]` marks what cannot be evicted.

    For steps of a graph, which cannot raise: NaN is not looked for.
    """
    return lowest(_scores_beside(stages, observation, stay))[0]


def _scores_beside(stages: Stages, observation: Observation, stay: Tensor) -> Tensor:
    """Scores `[B, H, T]`, ∞ for those that `stay`."""
    return scores_of(stages, observation, stay.shape[1]).masked_fill(stay, torch.inf)


def leaving_between(
    scores: Tensor, hidden: Tensor | None, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """As `leaving`, by finite scores `[B, H, T]`, where the `first` and `last` slots stay.

    `hidden [B, H, T]` is −∞ at holes, 0 elsewhere; None: no holes.
    """
    scores = scores if hidden is None else scores - hidden
    return lowest(scores[..., first : scores.shape[-1] - last], first)


def scores_of(stages: Stages, observation: Observation, heads: int) -> Tensor:
    """Scores `[B, heads, T]` of the stored heads: means over the KV heads that share a latent.

    Raises KvfoldError, naming the method, for scores of another shape or dtype.
    """
    assert stages.score is not None
    scores = stages.score(observation)
    stored = observation.positions.shape[-1]
    if stored == 0 and observation.attention is not None:  # several layers at once, without entries
        stored = observation.attention.shape[-1]
    wanted = (*observation.keys.shape[:2], stored)
    if not isinstance(scores, Tensor) or scores.shape != wanted or not scores.is_floating_point():
        raise _refused(stages, wanted, scores)
    if scores.itemsize < 4:
        scores = scores.float()  # 16 bits cannot order more than a few hundred entries
    expanded = wanted[1] // heads
    if expanded > 1:
        scores = scores.unflatten(1, (heads, expanded)).mean(2)
    # Only forced entries and padding are infinite. Heads that share their scores are bounded once.
    limits = torch.finfo(scores.dtype)
    if scores.stride(1):
        return scores.clamp(limits.min, limits.max)
    return scores[:, :1].clamp(limits.min, limits.max).expand_as(scores)


def per_observed_head(of_stored: Tensor, observation: Observation) -> Tensor:
    """Numbers `[B, H, T]` of stored heads, for each head of the observation (latents)."""
    expanded = observation.keys.shape[1] // of_stored.shape[1]
    return of_stored if expanded == 1 else of_stored.repeat_interleave(expanded, 1)


def check_numbers(stages: Stages, scores: Tensor) -> None:
    """Raises KvfoldError, naming the method, if any score is NaN."""
    if bool(scores.isnan().any()):
        raise KvfoldError(
            f"{stages.method} scores entries with NaN, which cannot be ranked: look for 0/0, and "
            "for rows in which everything is hidden"
        )


def _refused(stages: Stages, wanted: tuple[int, ...], given: object) -> KvfoldError:
    return KvfoldError(
        f"{stages.method} scores with {_told(given)} where float32 {list(wanted)} is wanted: one "
        "number for each entry of each KV head, as in observation.keys"
    )


def _check_slots(stages: Stages, slots: Tensor, forced: Tensor, counts: Tensor) -> None:
    """Raises KvfoldError, naming the method, for a wrong selection `slots [B, H, K]`.

    Slots are int64, ascend after holes of −1, hold all of `forced [B, H, T]`, and are no more than
    `counts [B, H]`.
    """
    if not isinstance(slots, Tensor) or slots.dtype != torch.int64 or slots.dim() != 3:
        raise KvfoldError(f"{stages.method} selects {_told(slots)} where int64 [B, H, K] is wanted")
    stored, earlier, later = forced.shape[-1], slots[..., :-1], slots[..., 1:]
    faults = {
        "slots that do not ascend, −1 for holes first": (later <= earlier) & (later >= 0),
        "holes behind slots": (later < 0) & (earlier >= 0),
        f"slots outside of {stored} entries": (slots < -1) | (slots >= stored),
        "not all forced entries": forced & ~kept_mask(slots.clamp(max=stored - 1), stored),
        "more entries than counts": (slots >= 0).sum(-1) > counts,
    }
    found = torch.stack([wrong.any() for wrong in faults.values()]).tolist()  # waits for a GPU once
    if any(found):
        fault = [*faults][found.index(True)]
        raise KvfoldError(f"{stages.method} selects {fault}")


def _check_head_sizes(stages: Stages, sizes: Tensor, wanted: Sequence[int]) -> None:
    """Raises KvfoldError, naming the method, unless sizes of heads are integers `[B, H]`."""
    if not isinstance(sizes, Tensor) or sizes.shape != wanted or sizes.is_floating_point():
        raise KvfoldError(
            f"{stages.method} gives heads {_told(sizes)} where integers {list(wanted)} are wanted"
        )


def _told(given: object) -> str:
    """A stage's result, in words: dtype and shape of a tensor, else its type."""
    if isinstance(given, Tensor):
        return f"{given.dtype} {list(given.shape)}"
    return f"a {type(given).__name__}"
