# SPDX-License-Identifier: Apache-2.0
"""Ridge regression from streaming sums: products of features, never the rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RidgeSums:
    """Sums over the rows x, y of M linear models: `gram [M, F, F]` of x·xᵀ, `cross [M, F]` of x·y.

    Float64. `count` is the number of rows of each model.
    """

    gram: Tensor
    cross: Tensor
    count: int = 0

    @classmethod
    def empty(cls, models: int, features: int) -> RidgeSums:
        """Sums over no rows."""
        gram = torch.zeros(models, features, features, dtype=torch.float64)
        return cls(gram, torch.zeros(models, features, dtype=torch.float64))

    def add(self, first: int, features: Tensor, targets: Tensor) -> None:
        """Adds rows of the models from `first` on: features `[m, n, F]`, targets `[m, n]`.

        Rows of model 0 are counted: all models get equally many.
        """
        rows, wanted = features.double().cpu(), targets.double().cpu()
        these = slice(first, first + len(rows))
        self.gram[these] += rows.mT @ rows
        self.cross[these] += (rows.mT @ wanted[..., None]).squeeze(-1)
        if first == 0:
            self.count += rows.shape[1]

    def solve(self, chosen: Tensor, penalty: float, free: int) -> Tensor:
        """Ridge weights `[M, f]`, float64, of the features at `chosen [f]`.

        They minimize Σ(y − w·x)² + penalty·n·Σw² over n rows; the second sum leaves out the
        constant feature `free`.
        """
        added = torch.diag(penalty * self.count * (chosen != free).double())
        solved = []
        for gram, cross in zip(self.gram, self.cross, strict=True):
            solved.append(torch.linalg.solve(gram[chosen][:, chosen] + added, cross[chosen]))
        return torch.stack(solved)
