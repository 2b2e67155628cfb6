# SPDX-License-Identifier: Apache-2.0
"""Leverage scores: golden numbers, the projection matrix in float64, and degenerate keys."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kvfold.methods.observation import Observation
from kvfold.methods.stages.score.leverage import _factor, leverage_scores
from kvfold.observers.stored import KeysBeforeRope
from tests.helpers.observations import observed

GOLDEN = [0.499072, 0.374258, 0.373929, 0.498746, 0.498416, 0.498909, 0.373604, 0.865843]


def unturned(seen: Observation) -> Observation:
    """The same with keys that RoPE leaves as they are."""
    return dataclasses.replace(
        seen, observed={KeysBeforeRope: seen.positions}, rotate=lambda keys, _: keys
    )


def of(keys: Tensor, lengths: list[int], seed: int = 0) -> Observation:
    """An observation of keys `[B, H, T, D]`, left-padded to rows of these lengths."""
    columns = torch.arange(keys.shape[2]) - (keys.shape[2] - torch.tensor(lengths))[:, None]
    positions = columns.clamp(min=-1)[:, None].expand(keys.shape[:3])
    return unturned(Observation(keys, keys, positions, seed=seed))


@pytest.mark.parametrize("left", [0, 3])
def test_leverage(left: int) -> None:
    scores = leverage_scores(unturned(observed(left=left)), sketch=48, jitter=1e-2)[0, 0]
    torch.testing.assert_close(scores[left:], torch.tensor(GOLDEN), atol=2e-6, rtol=0)
    assert not scores[:left].any()
    assert float(scores.sum()) == pytest.approx(3.982778, abs=1e-5)


def dense(keys: Tensor, sketch: Tensor | None, jitter: float) -> Tensor:
    """Diagonal of X (XᵀX + jitter·I)⁻¹ Xᵀ of `keys [T, D]`, float64."""
    rows = keys.double() - keys.double().mean(0)
    rows = rows if sketch is None else rows @ sketch.double()
    gram = rows.T @ rows + jitter * torch.eye(rows.shape[1], dtype=torch.float64)
    return (rows @ gram.inverse() @ rows.T).diagonal()


@pytest.mark.parametrize("sketch", [64, 24, 5])
def test_rows_are_scored_as_alone_and_as_the_dense_projection(sketch: int) -> None:
    keys = torch.randn(2, 3, 90, 24, generator=torch.Generator().manual_seed(1))
    scores = leverage_scores(of(keys, [90, 61], seed=7), sketch, 1e-2)
    gaussian = torch.randn(24, sketch, generator=torch.Generator().manual_seed(7)) / sketch**0.5
    for row, length in enumerate([90, 61]):
        alone = of(keys[row : row + 1, :, -length:], [length], seed=7)
        of_alone = leverage_scores(alone, sketch, 1e-2)[0]
        torch.testing.assert_close(of_alone, scores[row, :, -length:], atol=1e-6, rtol=1e-5)
        for head in range(3):
            own = keys[row, head, -length:]
            expected = dense(own, gaussian if sketch < 24 else None, 1e-2)
            got = scores[row, head, -length:].double()
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_entries_that_take_no_part_change_nothing() -> None:
    keys = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(2))
    keys[:, :, :4] *= 100
    among = torch.arange(40).expand(1, 2, 40) >= 4
    scores = leverage_scores(of(keys, [40]), 48, 1e-2, among)
    without = leverage_scores(of(keys[:, :, 4:], [36]), 48, 1e-2)
    torch.testing.assert_close(scores[..., 4:], without)
    assert not scores[..., :4].any()


def test_keys_of_low_rank_and_of_any_size_have_scores() -> None:
    keys = torch.randn(1, 1, 50, 2).repeat(1, 1, 1, 4)
    for factor in (0.0, 1e-6, 1.0, 1e4):
        scores = leverage_scores(of(keys * factor, [50]), 48, 1e-2)
        assert scores.isfinite().all() and bool((scores <= 1 + 1e-3).all())


def test_the_jitter_grows_until_it_suffices() -> None:
    gram = torch.tensor([[-0.5, 0.0], [0.0, 1.0]]).double()
    factor = _factor(torch.stack([gram, gram.abs()])[None], 1e-2)
    added = (factor @ factor.mT)[0] - torch.stack([gram, gram.abs()])
    torch.testing.assert_close(added[0], torch.eye(2).double())  # .01 and .1 were too small
    torch.testing.assert_close(added[1], 1e-2 * torch.eye(2).double())
    assert _factor(-1e9 * gram.abs()[None, None], 1e-2).isnan().all()
