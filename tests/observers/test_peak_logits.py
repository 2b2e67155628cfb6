# SPDX-License-Identifier: Apache-2.0
"""The highest logit of each entry, by loops over the model's own queries and keys."""

from __future__ import annotations

import torch

from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import PIECES, SHAPES, Layer, assert_prefill, best


def by_peaks(layer: Layer) -> list[list[int]]:
    """Slots that each head keeps."""
    groups = layer.query.split(len(layer.query) // len(layer.heads))
    kept = []
    for head, queries in zip(layer.heads, groups, strict=True):
        logits = queries @ head.keys.T * layer.scale
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        kept.append(best(logits.masked_fill(~seen, -torch.inf).amax((0, 1)), SMALL))
    return kept


@SHAPES
@PIECES
def test_entries_stay_by_their_highest_logit(heads, lengths, chunk):
    keep = lambda layers: [by_peaks(layer) for layer in layers]  # noqa: E731
    assert_prefill("peak", SMALL, heads, lengths, keep, chunk)
