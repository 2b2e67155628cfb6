# SPDX-License-Identifier: Apache-2.0
"""Norms of projected values, compared with numbers by hand and with the product itself."""

from __future__ import annotations

import pytest
import torch

from kvfold.kernels import projected_norms
from kvfold.kernels.projected_norms import gram, l1_norms, l2_norms


def test_norms_of_eight_values_by_hand():
    i, j = torch.arange(8)[:, None], torch.arange(4)
    values = (((5 * i + 2 * j + 4 * i * j) % 7 - 3) / 2)[None, None]
    i, j = torch.arange(4)[:, None], torch.arange(3)
    weight = (((3 * i + 2 * j + i * j) % 5 - 2) / 2).T[None]  # [1, Dm, Dv]
    l1 = torch.tensor([3.75, 3, 4.75, 4.5, 2.75, 7.25, 2, 3.75])
    l2 = [2.795085, 1.767767, 2.926175, 4.031129, 2.076656, 4.422952, 1.274755, 2.795085]
    torch.testing.assert_close(l1_norms(values, weight)[0, 0], l1)
    torch.testing.assert_close(l2_norms(values, gram(weight))[0, 0], torch.tensor(l2))


@pytest.mark.parametrize("tile", [1, 500, 2**24])
def test_norms_in_tiles_are_those_of_the_product(tile, monkeypatch):
    monkeypatch.setattr(projected_norms, "TILE", tile)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 3, 17, 5, generator=generator)
    weight = torch.randn(6, 11, 5, generator=generator)
    product = values.double().repeat_interleave(2, 1) @ weight.double().transpose(1, 2)
    torch.testing.assert_close(l1_norms(values, weight), product.abs().sum(-1).float())
    norms = l2_norms(values, gram(weight))
    torch.testing.assert_close(norms, product.norm(dim=-1).float(), atol=1e-5, rtol=1e-5)
