# SPDX-License-Identifier: Apache-2.0
"""Observations made by hand, and naive attention in float64 to compare scores with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvfold.methods.observation import Observation

SIZE, SCALE = 8, 0.4


def observe(lengths, heads=2, groups=2, window=8, **options):
    """Rows of `lengths` tokens, left-padded with loud nonsense; the last `window` queries."""
    generator = torch.Generator().manual_seed(sum(lengths))
    seen, batch = max(lengths), len(lengths)
    queries = torch.randn(batch, heads * groups, seen, SIZE, generator=generator)
    keys = torch.randn(batch, heads, seen, SIZE, generator=generator)
    places = torch.arange(seen) - (seen - torch.tensor(lengths))[:, None]
    padding = places < 0
    keys = keys.masked_fill(padding[:, None, :, None], 50.0)
    queries = queries.masked_fill(padding[:, None, :, None], 50.0)
    places = places.masked_fill(padding, -1)
    return Observation(
        keys,
        torch.zeros_like(keys),
        places[:, None].expand(batch, heads, seen),
        queries[:, :, -window:],
        places[:, -window:],
        scale=SCALE,
        **options,
    )


def alone(seen, row, length):
    """One row of a batch as if it had come without the others, and so without padding."""
    heads = seen.keys.shape[1]
    window = min(length, seen.queries.shape[2])
    columns = torch.arange(length)
    return Observation(
        seen.keys[row : row + 1, :, -length:],
        seen.values[row : row + 1, :, -length:],
        columns.expand(1, heads, length),
        seen.queries[row : row + 1, :, -window:],
        columns[None, -window:],
        scale=SCALE,
        seed=seen.seed,
    )


def naive_rows(seen, softcap=None, sink_logits=None):
    """Attention `[Hq][W][T]` of row 0, whose last query is at its last key."""
    queries, keys = seen.queries[0].double(), seen.keys[0].double()
    query_heads, window, stored = len(queries), queries.shape[1], keys.shape[1]
    rows = torch.zeros(query_heads, window, stored, dtype=torch.float64)
    for head in range(query_heads):
        key = keys[head // (query_heads // len(keys))]
        for w in range(window):
            visible = stored - window + w + 1
            weights = []
            for j in range(visible):
                logit = float(queries[head, w] @ key[j]) * SCALE
                logit = logit if softcap is None else softcap * math.tanh(logit / softcap)
                weights.append(math.exp(logit))
            total = sum(weights) + (0 if sink_logits is None else math.exp(sink_logits[head]))
            rows[head, w, :visible] = torch.tensor(weights) / total
    return rows


def mean_of_groups(per_query_head, groups):
    parts = per_query_head.split(groups)
    return torch.stack([sum(part) / groups for part in parts])


T, D = 8, 4
ROW, COLUMN = torch.arange(T)[:, None], torch.arange(D)
KEYS = ((7 * ROW + 3 * COLUMN + ROW * COLUMN) % 11 - 5) / 4
VALUES = ((5 * ROW + 2 * COLUMN + 4 * ROW * COLUMN) % 7 - 3) / 2
QUERIES = ((4 * ROW + 5 * COLUMN + 2 * ROW * COLUMN) % 9 - 4) / 4


def observed(window: int = 0, left: int = 0) -> Observation:
    """One head of eight entries, after `left` columns of padding."""

    def padded(entries: Tensor) -> Tensor:
        return torch.cat([torch.ones(left, D), entries])[None, None]

    positions = torch.cat([torch.full((left,), -1), torch.arange(T)])[None, None]
    return Observation(
        padded(KEYS),
        padded(VALUES),
        positions,
        QUERIES[None, None, T - window :] if window else None,
        torch.arange(T - window, T)[None] if window else None,
        scale=0.5,
    )
