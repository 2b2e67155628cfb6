# SPDX-License-Identifier: Apache-2.0
"""Selection inside blocks: the newest entries, then each block's share of what is left."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.methods.stages.allocate.rounding import largest_remainder
from kvfold.methods.stages.select.blocks import best_of_blocks, proportional

SCORES = torch.tensor([9.0, 1, 5, 2, 3, 8, 7, 6, 0, 0, 0, 0])  # blocks 2-4, 5-7, then the newest


def seen(scores: Tensor) -> Observation:
    """An observation of entries of one channel, which the selection does not read."""
    return Observation(scores[..., None], scores[..., None], torch.arange(scores.shape[-1]))


def kept(count: int, forced: tuple[int, ...] = (0, 1), left: int = 0) -> list[int]:
    positions = torch.cat([torch.full((left,), -1), torch.arange(12)])[None, None]
    must = torch.zeros(1, 1, 12 + left, dtype=torch.bool)
    must[..., [left + slot for slot in forced]] = True
    scores = torch.cat([torch.full((left,), 99.0), SCORES])[None, None]
    counts = torch.tensor([[count]])
    slots = best_of_blocks(seen(scores), scores, must, positions, counts, first=2, block=3)
    return [slot - left for slot in slots[0, 0].tolist()]


@pytest.mark.parametrize("left", [0, 5])
def test_each_block_keeps_its_share_of_what_the_newest_leave(left: int) -> None:
    assert kept(8, left=left) == [0, 1, 2, 5, 8, 9, 10, 11]
    assert kept(10, left=left) == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]


def test_an_odd_one_goes_to_the_earlier_block() -> None:
    assert kept(9) == [0, 1, 2, 4, 5, 8, 9, 10, 11]


def test_a_small_budget_keeps_the_newest_only() -> None:
    assert kept(5) == [0, 1, 9, 10, 11]


def test_forced_entries_are_beside_the_share_of_their_block() -> None:
    # Two of block 2-4 are open, three of block 5-7: of three entries 1.2 and 1.8.
    assert kept(10, (0, 1, 3)) == [0, 1, 2, 3, 5, 6, 8, 9, 10, 11]


def test_fewer_than_two_blocks_are_kept_by_recency() -> None:
    positions = torch.arange(7)[None, None]
    forced = positions < 2
    scores = SCORES[None, None, :7]
    counts = torch.tensor([[4]])
    slots = best_of_blocks(seen(scores), scores, forced, positions, counts, first=2, block=3)
    assert slots[0, 0].tolist() == [0, 1, 5, 6]


def test_shares_are_those_of_the_largest_remainder() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 9, (3, 4, 7), generator=generator)
    totals = torch.randint(0, 30, (3, 4), generator=generator)
    got = proportional(totals, sizes)
    for row in range(3):
        for head in range(4):
            whole = sizes[row, head].tolist()
            total = min(int(totals[row, head]), sum(whole))
            shares = [total * size / max(1, sum(whole)) for size in whole]
            assert got[row, head].tolist() == largest_remainder(shares, total)
    assert bool((got <= sizes).all())
