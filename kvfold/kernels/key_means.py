# SPDX-License-Identifier: Apache-2.0
"""Means of keys before RoPE, kept beside codes of what keys differ by.

A bias of the keys' projection lies in every key, turned by RoPE to the key's position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kvfold.kernels.mean_rotation import Rotate
from kvfold.kernels.views import Flat, Named

# Mean square of keys beside their variance, beyond which codes lose too much of the difference.
# Heads of SmolLM2 reach 20, with biases of 80 on two channels 77 and more.
SHARED = 32
ENOUGH, ENOUGH_TURNED = 4, 24  # keys that tell, before RoPE and behind it


@dataclass(frozen=True)
class KeyMeans:
    """Means `rows [segments, D]`, zeros where a segment has none, and the quantized keys' places.

    positions `[sum, 1]`, int32, are those to which RoPE has rotated the keys.
    """

    rows: Tensor
    positions: Flat
    rotate: Rotate

    def turned(self, i: int | None = None) -> Tensor:
        """The mean at the place of each key of segment i `[n, D]`; None: of all segments."""
        if i is None:
            counts = torch.tensor(self.positions.lengths, device=self.rows.device)
            rows, at = self.rows.repeat_interleave(counts, 0), self.positions.rows
        else:
            at = self.positions.segment(i)
            rows = self.rows[i].expand(len(at), -1)
        return self.rotate(rows[None, None], at.long().T)[0, 0]

    def without(self, counts: list[int]) -> Self:
        """Segments of `counts` keys without a mean."""
        nowhere = self.positions.rows.new_zeros(sum(counts), 1)
        return replace(self, rows=torch.zeros_like(self.rows), positions=Flat(nowhere, counts))

    def extended(self, new: KeyMeans) -> Self:
        """Each segment followed by that of `new`, which has the same mean if it had keys."""
        rows = self.rows.where(self.rows.any(1, keepdim=True), new.rows)
        return replace(self, rows=rows, positions=self.positions.extended(new.positions))

    def select(self, segments: list[int]) -> Self:
        """A copy of these segments, in this order."""
        return replace(self, rows=self.rows[segments], positions=self.positions.select(segments))

    @classmethod
    def from_named(cls, parts: Named, size: int, counts: list[int], rotate: Rotate | None) -> Self:
        """Copy from the tensors of files, for segments of `counts` quantized keys `[·, size]`.

        Raises ValueError for parts that do not fit together, and for a model of unknown RoPE.
        """
        means, at = parts["means"], parts["positions"]
        fits = all(mean.shape == (size,) and mean.isfinite().all() for mean in means)
        fits = fits and [each.shape for each in at] == [(count, 1) for count in counts]
        if not fits or rotate is None or {each.dtype for each in at} != {torch.int32}:
            raise ValueError("means and positions of keys that do not fit their codes")
        return cls(torch.stack(means), Flat.of(at), rotate)

    def tensors(self) -> list[Tensor]:
        """Means and positions."""
        return [self.rows, self.positions.rows]


def shared_mean(keys: Tensor) -> Tensor:
    """Mean `[D]` of un-rotated keys `[n, D]`; zeros unless they share far more than they differ by.

    Zeros for too few keys to tell.
    """
    if len(keys) < ENOUGH:
        return keys.new_zeros(keys.shape[1])
    return keys.mean(0) * (keys.square().sum(1).mean() > SHARED * keys.var(0).sum())


def share_a_bias(rows: Tensor) -> bool:
    """True if keys `[n, D]` behind an unknown RoPE share far more than they differ by.

    The lengths of pairs of channels vary, as RoPE turns a bias within its pair: of a channel and
    the one half a key away, or of neighbours. False for too few keys to tell.
    """
    if len(rows) < ENOUGH_TURNED:
        return False
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    pairs = wide.unflatten(1, (2, -1)).norm(dim=1), wide.unflatten(1, (-1, 2)).norm(dim=2)
    varied = torch.stack([2 * lengths.var(0).sum() for lengths in pairs]).amin()
    return bool(wide.square().sum(1).mean() > 3 * SHARED * varied)
