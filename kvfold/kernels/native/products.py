# SPDX-License-Identifier: Apache-2.0
"""Products of small whole numbers and a matrix that is rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.kernels.native.library import call, library, note_operations

MIDDLE, PEAK = 128, 127
PANEL = 48  # rows of the matrix, as of products.cpp
FOUR = 4  # bytes that are multiplied at once


@cache
def available() -> bool:
    """True if the library is there and this CPU multiplies bytes."""
    return library() is not None and call("can_multiply_bytes") == 1


@dataclass(frozen=True, eq=False)
class ByteMatrix:
    """A matrix `[p, k]` whose rows are rounded to whole steps, up to 127 of them.

    Args:
        panels: four numbers of a row beside those of 47 others `[p / 48, k / 4, 48, 4]`, int8.
        scales: the step of each row `[p]`.
    """

    panels: Tensor
    scales: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> ByteMatrix:
        """From a matrix `[p, k]`, float32."""
        matrix = matrix.float()
        rows, columns = matrix.shape
        scales = matrix.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / PEAK
        steps = (matrix / scales[:, None]).round_().to(torch.int8)
        steps = F.pad(steps, (0, -columns % FOUR, 0, -rows % PANEL))
        fours = steps.view(torch.int32).unflatten(0, (-1, PANEL)).transpose(1, 2)
        return cls(fours.contiguous().view(torch.int8), scales)

    def products(
        self, columns: Sequence[int], codes: Tensor, chosen: Tensor, offsets: Tensor, factor: float
    ) -> Tensor:
        """Offsets `[p]` plus `factor` times the products `[n, p]` with codes, float32.

        codes `[c, n]`, int16, of these `columns` of the matrix; those `chosen`, bool `[c]`, are up
        to 127, and the others count as 0. Needs `available()`.
        """
        fours, n, rows = self.panels.shape[1], codes.shape[1], len(self.scales)
        at = torch.tensor(columns, dtype=torch.int64, device="cpu")
        wide = torch.full((fours * FOUR, n), MIDDLE, dtype=torch.uint8, device="cpu")
        wide[at] = (codes + MIDDLE).to(torch.uint8)
        wide[at[~chosen]] = MIDDLE
        out = torch.empty(n, rows, dtype=torch.float32, device="cpu")
        offsets = offsets.float().contiguous()
        call(
            "multiply_bytes",
            *(wide.T.contiguous(), self.panels, factor * self.scales, offsets, out),
            *(n, rows, fours, MIDDLE, torch.get_num_threads()),
        )
        note_operations(n * rows * len(columns))
        return out
