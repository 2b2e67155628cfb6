# SPDX-License-Identifier: Apache-2.0
"""Picking entries by slot, whatever their strides."""

import itertools

import pytest
import torch

from kvfold.kernels.gather import take


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LAYOUTS = {
    "as it is": lambda x: x.contiguous(),
    "with room behind": lambda x: torch.cat([x, torch.full_like(x, torch.nan)], 2)[:, :, :7],
    "as models hand it out": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "numbers apart": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
    "one for all heads": lambda x: x[:, :1].expand(-1, 3, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_entries_are_picked_whatever_their_strides(layout):
    entries = LAYOUTS[layout](noise(2, 3, 7, 4))
    slots = torch.randint(-1, 7, (2, 3, 9), generator=torch.Generator().manual_seed(1))
    got = take(entries, slots)
    assert got.shape == (2, 3, 9, 4)
    for b, h, k in itertools.product(range(2), range(3), range(9)):
        if slots[b, h, k] >= 0:
            assert torch.equal(got[b, h, k], entries[b, h, slots[b, h, k]])
    got.zero_()  # a copy
    assert entries.abs().min() > 0


def test_holes_may_be_picked_out_of_nothing():
    assert take(torch.zeros(1, 2, 0, 4), torch.full((1, 2, 3), -1)).shape == (1, 2, 3, 4)
