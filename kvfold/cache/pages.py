# SPDX-License-Identifier: Apache-2.0
"""Whole pages of each head, made of what every head would keep by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.errors import BudgetError
from kvfold.methods.stages.allocate.pages import whole_pages
from kvfold.methods.stages.allocate.pool import apart, together
from kvfold.methods.stages.select.choose import Chosen
from kvfold.methods.stages.select.top import kept_mask, top, with_forced


def in_pages(
    own: Sequence[Chosen], positions: Sequence[Tensor], seen: Sequence[Tensor], size: int
) -> list[Chosen | None]:
    """The entries that layers sized together keep in pages of `size`; None where all stay.

    `own` is each layer's own choice of entries at `positions [B, H, T]`, −1 for padding, of
    `seen [B]` tokens. The last `seen % size` of these, the rest, stay beside the pages. A row that
    keeps everything is left as it is. Raises BudgetError for a row of which entries leave, and
    whose own entries fill fewer pages than there are layers.
    """
    rests = [_rest(*of_layer, size) for of_layer in zip(positions, seen, strict=True)]
    counts = [(each.slots >= 0).sum(-1) for each in own]
    stored = [(of_layer >= 0).sum(-1) for of_layer in positions]
    beside = [rest.sum(-1) for rest in rests]
    forced = [
        (each.forced & (of_layer >= 0) & ~rest).sum(-1)
        for each, of_layer, rest in zip(own, positions, rests, strict=True)
    ]
    joined = together(counts)
    rows = zip(*(together(part).tolist() for part in (counts, stored, forced, beside)), strict=True)
    sizes = torch.tensor([_sizes(size, len(own), *row) for row in rows], device=joined.device)
    over = bool((sizes.sum(-1) > joined.sum(-1)).any())
    parts = apart(sizes, counts, [of_layer.shape[1] for of_layer in counts])
    # Above the budget whole layers are chosen too, as they then tell of it.
    return [
        None
        if not over and bool((kept == all_).all())
        else _with_size(each, kept, places, rest, over)
        for each, kept, all_, places, rest in zip(own, parts, stored, positions, rests, strict=True)
    ]


def _rest(positions: Tensor, seen: Tensor, size: int) -> Tensor:
    """Bool mask `[B, H, T]` of the tokens of each row's last page, if these do not fill it."""
    return positions >= (seen - seen % size).view(-1, 1, 1)


def _sizes(
    size: int,
    layers: int,
    counts: list[int],
    stored: list[int],
    forced: list[int],
    beside: list[int],
) -> list[int]:
    """Entries that each head of a row keeps, of all layers one after another.

    Those `beside` pages are among `stored`, and not among `forced`.
    """
    if counts == stored:
        return counts
    if sum(counts) < size * layers:
        raise BudgetError(
            f"{sum(counts)} entries of {len(counts)} KV heads fill {sum(counts) // size} pages of "
            f"{size}, and {layers} layers keep a page each at least: raise the budget, or choose a "
            "smaller size"
        )
    left = [count - rest for count, rest in zip(counts, beside, strict=True)]
    there = [all_ - rest for all_, rest in zip(stored, beside, strict=True)]
    kept = whole_pages(left, forced, there, size, fewest=layers)
    return [count + rest for count, rest in zip(kept, beside, strict=True)]


def _with_size(own: Chosen, kept: Tensor, positions: Tensor, rest: Tensor, over: bool) -> Chosen:
    """The choice with `kept [B, H]` entries in each head, the `rest` among them.

    A head with more than its own choice gets others by score; one with fewer keeps the best of it.
    """
    forced = own.forced | rest
    chosen = forced & (positions >= 0) | kept_mask(own.slots, positions.shape[2])
    more = (kept > chosen.sum(-1))[..., None]
    scores = with_forced(own.scores, torch.where(more, chosen, forced), positions)
    slots = top(scores.masked_fill(~more & ~chosen, -torch.inf), kept)
    return dataclasses.replace(own, slots=slots, forced=forced, over_budget=own.over_budget or over)
