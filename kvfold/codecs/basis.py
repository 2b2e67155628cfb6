# SPDX-License-Identifier: Apache-2.0
"""The basis in which a model's keys and values are coded: their principal directions.

Channels are weighted by the effect of an error: those of keys by the size of their queries, those
of values by W_o's columns over the residual stream's size. Directions are those of weighted
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.methods.fitted import Fitted

# "joint": one vector for all layers and heads of a token; "head": one for each KV head.
Scope = Literal["joint", "head"]
EXACT = 127  # codes up to here are exact in bfloat16, and their errors small beside half a step


@dataclass(frozen=True, eq=False)
class Basis(Fitted):
    """Means, weights and directions of keys before RoPE, and of values.

    `p` numbers of consecutive layers make a block, so that its covariance stays small.

    Args:
        key_means, value_means: `[L, H, D]`.
        key_weights, value_weights: `[L, H, D]`.
        key_directions, value_directions: `[blocks, p, R]`, float16, orthonormal.
        key_head_directions, value_head_directions: `[L, H, D, D]`, of each KV head alone.
    """

    method: ClassVar[str] = "kvtc"
    command: ClassVar[str] = "kvfold fit MODEL TEXTS --codec kvtc"
    bundled: ClassVar[str] = "codec.safetensors"
    key_means: Tensor
    key_weights: Tensor
    key_directions: Tensor
    key_head_directions: Tensor
    value_means: Tensor
    value_weights: Tensor
    value_directions: Tensor
    value_head_directions: Tensor

    @property
    def keys(self) -> Transform:
        """The transform of keys."""
        return Transform(
            self.key_means, self.key_weights, self.key_directions, self.key_head_directions
        )

    @property
    def values(self) -> Transform:
        """The transform of values."""
        return Transform(
            self.value_means, self.value_weights, self.value_directions, self.value_head_directions
        )


class Codes(NamedTuple):
    """Codes `[rows, n]` of those directions of a block that are not all zero."""

    rows: list[int]
    codes: Tensor


@dataclass(frozen=True, eq=False)
class Transform:
    """To the coefficients of a basis, and back; fields as of `Basis`."""

    means: Tensor
    weights: Tensor
    directions: Tensor
    head_directions: Tensor

    def forward(self, heads: Sequence[Tensor], scope: Scope) -> list[Tensor]:
        """Coefficients `[streams, n]` of entries `[n, D]` of each KV head, layer by layer.

        One tensor for each block of layers, or for each head.
        """
        if scope == "head":
            return [
                directions.T @ scaled.T
                for scaled, directions in zip(self._scaled(heads), self._of_heads(), strict=True)
            ]
        together = torch.cat(list(self._scaled(heads)), -1)
        parts = together.split(self.directions.shape[1], -1)
        return [of.float().T @ part.T for part, of in zip(parts, self.directions, strict=True)]

    def back(
        self, blocks: Sequence[Codes], step: float, scope: Scope, products: torch.dtype
    ) -> list[Tensor]:
        """Entries `[n, D]` of each KV head, float32, from coefficients of `step` times the codes.

        `products` are in float32 or, several times as fast, in bfloat16; of codes that bfloat16
        would round always in float32.
        """
        of_blocks, size = self.directions, self.means.shape[-1]
        if scope == "head":
            of_blocks = self._of_heads()
        numbers, columns = of_blocks.shape[0], of_blocks.shape[1]
        # The step and the weights are of the basis, which has fewer numbers than the entries.
        scales = step / self.weights.view(numbers, columns, 1)
        means, found = self.means.view(numbers, columns), list[Tensor]()
        for block, directions, scale, mean in zip(blocks, of_blocks, scales, means, strict=True):
            own = directions[:, block.rows].float() * scale
            found += _product(block.codes, own, products).add_(mean).split(size, -1)
        return found

    def streams(self, counts: Sequence[int], scope: Scope) -> list[tuple[int, int]]:
        """Rows and columns of the coefficients of `forward`, for heads of `counts` entries."""
        blocks, _, rank = self.directions.shape
        if scope == "head":
            return [(self.means.shape[-1], count) for count in counts]
        return [(rank, counts[0])] * blocks

    def _scaled(self, heads: Sequence[Tensor]) -> Iterator[Tensor]:
        means, weights = self.means.flatten(0, 1), self.weights.flatten(0, 1)
        for head, mean, weight in zip(heads, means, weights, strict=True):
            yield (head.float() - mean) * weight

    def _of_heads(self) -> Tensor:
        return self.head_directions.flatten(0, 1)


def _product(codes: Tensor, directions: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `[n, p]` of codes `[rows, n]` and directions `[p, rows]`, float32."""
    if dtype == torch.float32:
        return codes.float().T @ directions.T
    large = (codes.abs() > EXACT).any(-1)
    made = (codes[~large].to(dtype).T @ directions[:, ~large].to(dtype).T).float()
    return made.addmm_(codes[large].float().T, directions[:, large].T)
