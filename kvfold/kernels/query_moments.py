# SPDX-License-Identifier: Apache-2.0
"""Mean and covariance of each head's queries, joined over pieces of a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.kernels.mean_rotation import pair_norms


@dataclass(frozen=True)
class QueryMoments:
    """Moments of a row's queries, for each query head; 0 where none were counted. Float32."""

    count: Tensor  # [B], queries
    mean: Tensor  # [B, Hq, D]
    covariance: Tensor | None = None  # [B, Hq, D, D], divided by the count; None: not needed
    moduli: Tensor | None = None  # [B, Hq, D], mean length of each rotary pair; None: not needed

    def joined(self, other: QueryMoments) -> QueryMoments:
        """Moments of the queries of both.

        Sums of squares would cancel where means are large (Chan et al., 1979).
        """
        count = self.count + other.count
        weight = (other.count / count.clamp(min=1)).view(-1, 1, 1)
        apart = other.mean - self.mean
        mean, moduli = self.mean + weight * apart, self.moduli
        if moduli is not None and other.moduli is not None:
            moduli = moduli + weight * (other.moduli - moduli)
        if self.covariance is None or other.covariance is None:
            return QueryMoments(count, mean, None, moduli)
        weight = weight[..., None]
        between = weight * (1 - weight) * apart[..., :, None] * apart[..., None, :]
        within = (1 - weight) * self.covariance + weight * other.covariance
        return QueryMoments(count, mean, within + between, moduli)

    def turned(self, rotation: Tensor) -> QueryMoments:
        """Mean and covariance of the vectors x @ `rotation [B, D, D]`, for all queries x."""
        mean, rotation = self.mean @ rotation, rotation[:, None]
        if self.covariance is None:
            return QueryMoments(self.count, mean)
        turned = rotation.transpose(-1, -2) @ self.covariance @ rotation
        return QueryMoments(self.count, mean, turned)

    def index(self, rows: Callable[[Tensor], Tensor]) -> QueryMoments:
        """Moments of `rows`, a selection along the batch axis."""
        return dataclasses.replace(self.over_heads(rows), count=rows(self.count))

    def over_heads(self, change: Callable[[Tensor], Tensor]) -> QueryMoments:
        """Moments with `change` applied to the tensors `[B, Hq, …]`."""
        covariance = None if self.covariance is None else change(self.covariance)
        moduli = None if self.moduli is None else change(self.moduli)
        return QueryMoments(self.count, change(self.mean), covariance, moduli)

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.count, self.mean, self.covariance, self.moduli)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def query_moments(
    queries: Tensor, counted: Tensor | None, covariance: bool, pairs: Tensor | None = None
) -> QueryMoments:
    """Moments of `queries [B, Hq, S, D]`, of those `counted`, bool `[B, S]`; None: of all.

    `pairs [D, D]` are the rotary pairs whose mean lengths are wanted too.
    """
    if counted is None:
        count = queries.new_full((len(queries),), queries.shape[2])
    else:
        count = counted.sum(-1).to(queries.dtype)
        queries = queries.masked_fill(~counted[:, None, :, None], 0)
    among = count.clamp(min=1).view(-1, 1, 1)
    mean = queries.sum(2) / among
    moduli = None if pairs is None else pair_norms(queries, pairs).sum(2) / among
    if not covariance:
        return QueryMoments(count, mean, None, moduli)
    apart = queries - mean[:, :, None]
    if counted is not None:
        apart.masked_fill_(~counted[:, None, :, None], 0)
    return QueryMoments(count, mean, apart.transpose(-1, -2) @ apart / among[..., None], moduli)


def no_moments(like: Tensor, covariance: bool, moduli: bool = False) -> QueryMoments:
    """Moments of no queries, for `like [B, Hq, S, D]`."""
    rows, heads, _, size = like.shape
    none = torch.zeros(rows, heads, size, dtype=torch.float32, device=like.device)
    of_pairs = none[..., None].expand(-1, -1, -1, size) if covariance else None
    return QueryMoments(none[:, 0, 0], none, of_pairs, none if moduli else None)
