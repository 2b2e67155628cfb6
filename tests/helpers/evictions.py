# SPDX-License-Identifier: Apache-2.0
"""Evictions of random entries, and what is left of them."""

import dataclasses
import random

import torch

from kvfold.methods.stages.merge.base import Eviction

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def evict(rows, heads=2, seed=0, width=8, dtype=torch.float32, **options):
    """Left-padded rows with loud nonsense as padding; head h keeps h mod 2 fewer."""
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, stored, most = len(rows), max(r[0] for r in rows), max(r[1] for r in rows)
    positions = torch.full((batch, heads, stored), -1)
    slots = torch.full((batch, heads, most), -1)
    for b, (tokens, kept) in enumerate(rows):
        for h in range(heads):
            known = sorted(rng.sample(range(3 * tokens), tokens))
            positions[b, h, stored - tokens :] = torch.tensor(known)
            count = max(0, kept - h % 2)
            chosen = sorted(rng.sample(range(stored - tokens, stored), count))
            slots[b, h, most - count :] = torch.tensor(chosen, dtype=torch.long)
    padding = (positions < 0)[..., None]
    keys = torch.randn(batch, heads, stored, width, generator=noise).masked_fill(padding, 50.0)
    values = torch.randn(batch, heads, stored, width - 3, generator=noise).masked_fill(padding, 9e9)
    sums = torch.rand(batch, heads, stored, generator=noise).masked_fill(padding[..., 0], 7.0)
    keys, values = keys.to(dtype), values.to(dtype)
    return Eviction(keys, values, positions, slots, sums, **options)


def each_head(eviction):
    """Row, head, kept slots and evicted slots of every head."""
    for b, h in torch.cartesian_prod(*(torch.arange(n) for n in eviction.slots.shape[:2])).tolist():
        kept = [s for s in eviction.slots[b, h].tolist() if s >= 0]
        real = [s for s, p in enumerate(eviction.positions[b, h].tolist()) if p >= 0]
        yield b, h, kept, [s for s in real if s not in kept]


def some_rows(eviction, order):
    """The rows of a batch in another order, or some of them."""
    parts = {f.name: getattr(eviction, f.name) for f in dataclasses.fields(eviction)}
    return Eviction(**{k: v[order] if torch.is_tensor(v) else v for k, v in parts.items()})


def alone(eviction, row):
    """One row without its padding and holes, as far as its heads allow."""
    one = some_rows(eviction, [row])
    padding = int((one.positions < 0).sum(-1).min())
    holes = int((one.slots < 0).sum(-1).min())
    slots = one.slots[..., holes:]
    return dataclasses.replace(
        one,
        keys=one.keys[:, :, padding:],
        values=one.values[:, :, padding:],
        positions=one.positions[..., padding:],
        slots=torch.where(slots < 0, -1, slots - padding),
        column_sums=one.column_sums[..., padding:],
    )


def kept_entries(entries, eviction):
    """What an eviction keeps `[B, H, K, D]` as it was, 0 in holes."""
    holes = (eviction.slots < 0)[..., None]
    index = eviction.slots.clamp(min=0)[..., None].expand(-1, -1, -1, entries.shape[-1])
    return entries.gather(2, index).masked_fill(holes, 0.0)


def without_holes(entries, eviction):
    return entries.masked_fill((eviction.slots < 0)[..., None], 0.0)


def assert_rows_are_their_own(eviction, merge):
    batch = merge(eviction)
    turned = merge(some_rows(eviction, [2, 0, 3, 1]))
    for row in range(4):
        one = alone(eviction, row)
        single = merge(one)
        for part in (0, 1):
            whole = without_holes(batch[part], eviction)
            torch.testing.assert_close(
                without_holes(turned[part], some_rows(eviction, [2, 0, 3, 1]))[
                    [2, 0, 3, 1].index(row)
                ],
                whole[row],
                **CLOSE,
            )
            width = one.slots.shape[-1]
            torch.testing.assert_close(
                without_holes(single[part], one)[0], whole[row, :, -width:], **CLOSE
            )
        if batch[2] is not None:
            after = batch[2][row]
            if single[2] is None:
                assert after.isnan().all()
            else:
                torch.testing.assert_close(single[2][0], after, equal_nan=True)
