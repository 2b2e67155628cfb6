# SPDX-License-Identifier: Apache-2.0
"""Norms of entries follow what is stored."""

import pytest
import torch

from kvfold.store.dense import DenseStore


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SLOT = torch.tensor([[[0], [3], [7]], [[1], [1], [2]]])
NORMED = {
    "an entry comes": lambda store: store.append(noise(2, 3, 1, 4), noise(2, 3, 1, 5), 8),
    "entries come": lambda store: store.append(noise(2, 3, 30, 4), noise(2, 3, 30, 5), 8),
    "one is changed": lambda store: store.change(SLOT, noise(2, 3, 1, 4), noise(2, 3, 1, 5)),
    "one of a known norm is changed": lambda store: store.change(
        SLOT, noise(2, 3, 1, 4), noise(2, 3, 1, 5), noise(2, 3, 1, 4).norm(dim=-1).float()
    ),
    "one leaves": lambda store: store.drop(torch.full((2, 3, 1), 4)),
    "some stay": lambda store: store.keep(torch.tensor([1, 3, 6]).expand(2, 3, 3)),
    "all are replaced": lambda store: store.replace(noise(2, 3, 8, 4), noise(2, 3, 8, 5)),
    "the last go": lambda store: store.crop(3),
    "rows are picked": lambda store: store.index(lambda x: x[[1, 1, 0]]),
}


@pytest.mark.parametrize("what", NORMED)
def test_norms_are_those_of_what_is_stored(what):
    store = DenseStore(noise(2, 3, 8, 4, seed=1), noise(2, 3, 8, 5, seed=2))
    before = sum(store.nbytes(set()))

    def newest(one):
        return one.keys[:, :, -1:].norm(dim=-1).float()

    assert store.norms(store.keys, newest(store)).shape == (2, 3, 8)
    assert sum(store.nbytes(set())) == before + 4 * 2 * 3 * (8 + 12)
    NORMED[what](store)
    for one in (store, store.fork()):
        norms = one.norms(one.keys, newest(one))
        torch.testing.assert_close(norms, one.keys.norm(dim=-1).float())
