# SPDX-License-Identifier: Apache-2.0
"""A buffer that goes on from a shared prefix."""

from __future__ import annotations

import torch

from kvfold.store.shared_buffer import SharedBuffer


def test_a_branch_goes_on_from_its_trunk():
    trunk = torch.arange(24.0).view(1, 2, 4, 3)
    branch = SharedBuffer(trunk)
    assert branch.rows is trunk and branch.length == 4
    more = -torch.ones(1, 2, 2, 3)
    branch.append(more)
    assert torch.equal(branch.rows, torch.cat([trunk, more], 2)) and branch.length == 6
    room = branch.reserve(5)
    assert room.shape[2] == 11 and torch.equal(room[:, :, :6], branch.rows)
    assert not room[:, :, 6:].any()
    assert branch.nbytes()[0] == 4 * (24 + 12)
    branch.crop(1)
    branch.index(lambda rows: rows.repeat_interleave(2, 0))
    assert branch.rows.shape == (2, 2, 5, 3) and trunk.shape == (1, 2, 4, 3)
    branch.crop(1)
    assert torch.equal(branch.rows[1], trunk[0])
