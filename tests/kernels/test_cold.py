# SPDX-License-Identifier: Apache-2.0
"""Cold entries: those that came later are found too, and what is read is counted."""

import torch
from torch import Tensor

from kvfold.kernels.cold import Cold


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def test_cold_entries_grow_and_are_counted_when_read():
    cold = Cold.of([noise(4, 3), noise(2, 3, seed=1)])
    more = cold.extended(Cold.of([noise(1, 3, seed=2), noise(2, 3, seed=3)]))
    assert more.lengths == [5, 4] and cold.lengths == [4, 2]
    assert more.old is cold.old  # nothing that was there is copied
    got = more.take(torch.tensor([[0, 4], [3, 1]]))
    expected = [[more.segment(0)[0], more.segment(0)[4]], [more.segment(1)[3], more.segment(1)[1]]]
    assert torch.equal(got, torch.stack([torch.stack(pair) for pair in expected]))
    assert more.nbytes() == (9 * 3 * 8, 0, 4 * 3 * 8)
