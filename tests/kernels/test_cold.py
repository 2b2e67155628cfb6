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
    room = 2 * 2  # twice the most that a segment's newer entries took
    assert more.nbytes() == ((6 + 2 * room) * 3 * 8, 0, 4 * 3 * 8)


def test_later_entries_are_rarely_copied_and_each_holder_has_its_own():
    """Two that grow from one share what was there; only the first may write behind it."""
    lots = [Cold.of([noise(3, 2, seed=n), noise(3, 2, seed=n + 50)]) for n in range(40)]
    cold, pieces = lots[0], set()
    for lot in lots[1:]:
        cold = cold.extended(lot)
        pieces.add(cold.new.rows.data_ptr())
    assert len(pieces) <= 6  # 6, 12, … 192 entries
    for i in range(2):
        assert torch.equal(cold.segment(i), torch.cat([lot.segment(i) for lot in lots]))
    one, other = cold.extended(lots[1]), cold.extended(lots[2])
    assert torch.equal(one.segment(1)[-3:], lots[1].segment(1))
    assert torch.equal(other.segment(1)[-3:], lots[2].segment(1))
    assert torch.equal(one.segment(1)[:-3], cold.segment(1))
    assert one.alike(cold.extended(lots[1])) == (one.new.starts == other.new.starts)


def test_entries_behind_none_are_the_first_piece():
    """As of keys that begin beside others: values that begin with the same entries are alike."""
    rows = Cold.of([noise(4, 3), noise(4, 3, seed=1)])
    nothing = rows.kept([torch.arange(0)] * 2)
    assert nothing.extended(rows).alike(rows)
    assert not rows.extended(rows).alike(
        nothing.extended(rows).extended(rows.kept([torch.arange(3)] * 2))
    )
