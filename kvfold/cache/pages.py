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
from kvfold.methods.stages.select.top import top, with_forced


def in_pages(own: Sequence[Chosen], positions: Sequence[Tensor], size: int) -> list[Chosen | None]:
    """The entries that layers sized together keep in pages of `size`; None where all stay.

    `own` is each layer's own choice, by the highest scores, of entries at `positions [B, H, T]`, −1
    for padding. A row that keeps everything is left as it is. Raises BudgetError for a row of which
    entries leave, and whose own entries fill fewer pages than there are layers.
    """
    real = [of_layer >= 0 for of_layer in positions]
    counts = [(each.slots >= 0).sum(-1) for each in own]
    stored = [of_layer.sum(-1) for of_layer in real]
    forced = [(each.forced & of_layer).sum(-1) for each, of_layer in zip(own, real, strict=True)]
    joined = together(counts)
    rows = zip(joined.tolist(), together(forced).tolist(), together(stored).tolist(), strict=True)
    whole = [_sizes(kept, stay, all_, size, len(own)) for kept, stay, all_ in rows]
    sizes = torch.tensor(whole, device=joined.device)
    over = bool((sizes.sum(-1) > joined.sum(-1)).any())
    parts = apart(sizes, counts, [of_layer.shape[1] for of_layer in counts])
    return [
        None if bool((kept == all_).all()) else _with_size(each, kept, places, over)
        for each, kept, all_, places in zip(own, parts, stored, positions, strict=True)
    ]


def _sizes(
    counts: list[int], forced: list[int], stored: list[int], size: int, layers: int
) -> list[int]:
    """Entries that each head of a row keeps, of all layers one after another."""
    if counts == stored:
        return counts
    pages = sum(counts) // size
    if pages < layers:
        raise BudgetError(
            f"{sum(counts)} entries of {len(counts)} KV heads fill {pages} pages of {size}, and "
            f"{layers} layers keep a page each at least: raise the budget, or choose a smaller size"
        )
    return whole_pages(counts, forced, stored, size)


def _with_size(own: Chosen, kept: Tensor, positions: Tensor, over: bool) -> Chosen:
    """The choice with `kept [B, H]` entries in each head."""
    slots = top(with_forced(own.scores, own.forced, positions), kept)
    return dataclasses.replace(own, slots=slots, over_budget=own.over_budget or over)
