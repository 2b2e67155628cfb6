# SPDX-License-Identifier: Apache-2.0
"""Moments of queries, joined piece by piece, against float64 sums over all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.kernels.query_moments import QueryMoments, no_moments, query_moments

LENGTHS = torch.tensor([30, 17, 1, 0])
COUNTED = torch.arange(30) >= 30 - LENGTHS[:, None]


def queries(mean: float = 0.0) -> Tensor:
    """Queries `[4, 3, 30, 5]` about `mean`, loud nonsense at padding."""
    drawn = torch.randn(4, 3, 30, 5, generator=torch.Generator().manual_seed(0)) + mean
    return drawn.masked_fill(~COUNTED[:, None, :, None], 1e6)


def naive(given: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """Mean `[Hq, D]` and covariance `[Hq, D, D]` of a row's tokens, in float64."""
    real = given[row, :, 30 - int(LENGTHS[row]) :].double()
    mean = real.mean(1)
    return mean, torch.stack([torch.cov(head.T, correction=0) for head in real])


def assert_naive(moments: QueryMoments, given: Tensor, atol: float) -> None:
    assert torch.equal(moments.count, LENGTHS.float())
    for row in range(3):
        mean, covariance = naive(given, row)
        torch.testing.assert_close(moments.mean[row].double(), mean, atol=atol, rtol=1e-6)
        torch.testing.assert_close(moments.covariance[row].double(), covariance, atol=atol, rtol=0)
    assert moments.mean[3].eq(0).all() and moments.covariance[3].eq(0).all()


@pytest.mark.parametrize("size", [30, 7, 1])
@pytest.mark.parametrize("mean", [0.0, 300.0])
def test_pieces_have_the_moments_of_the_whole(size, mean):
    given = queries(mean)
    moments = no_moments(given, covariance=True)
    for piece, counted in zip(given.split(size, 2), COUNTED.split(size, 1), strict=True):
        moments = moments.joined(query_moments(piece, counted, covariance=True))
    # E[q²] − E[q]² would be wrong by 1e-2 in float32 where the mean is 300.
    assert_naive(moments, given, atol=2e-6 if mean == 0 else 2e-4)


def test_the_mean_alone():
    given = queries()
    first, second = (
        query_moments(part, counted, covariance=False)
        for part, counted in zip(given.split(20, 2), COUNTED.split(20, 1), strict=True)
    )
    both = first.joined(second)
    assert both.covariance is None and both.nbytes() == 4 * (4 + 4 * 3 * 5)
    torch.testing.assert_close(both.mean[1].double(), naive(given, 1)[0], atol=1e-6, rtol=0)


def test_turned_moments_are_those_of_turned_queries():
    given = queries()
    turn = torch.randn(4, 5, 5, generator=torch.Generator().manual_seed(1))
    before, after = (
        query_moments(each, COUNTED, covariance=True) for each in (given, given @ turn[:, None])
    )
    turned = before.turned(turn)
    torch.testing.assert_close(turned.mean, after.mean, atol=1e-5, rtol=0)
    torch.testing.assert_close(turned.covariance, after.covariance, atol=1e-5, rtol=0)


def test_rows_take_their_moments_along():
    moments = query_moments(queries(), COUNTED, covariance=True)
    rows = moments.index(lambda x: x[[1, 1]])
    assert rows.count.tolist() == [17, 17]
    assert torch.equal(rows.covariance, moments.covariance[[1, 1]])
