# SPDX-License-Identifier: Apache-2.0
"""The basis in which a model's keys and values are coded: their principal directions.

The metric of a head gives an error the cost that it has for later predictions; directions are those
of numbers in these metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.fitted.numbers import Fitted
from kvfold.kernels.native import products
from kvfold.kernels.native.products import ByteMatrix

# "joint": one vector for all layers and heads of a token; "head": one for each KV head.
Scope = Literal["joint", "head"]
SMALL = 63  # codes up to here: errors of directions rounded to 8 bits are small beside half a step


@dataclass(frozen=True, eq=False)
class Basis(Fitted):
    """Means, metrics and directions of keys before RoPE, and of values.

    `p` numbers of consecutive layers make a block, so that its covariance stays small.

    Args:
        key_means, value_means: `[L, H, D]`.
        key_metrics, value_metrics: `[L, H, D, D]`, symmetric: an error e costs |e·metric|².
        key_directions, value_directions: `[blocks, p, R]`, float16, orthonormal.
        key_head_directions, value_head_directions: `[L, H, D, D]`, of each KV head alone.
    """

    method: ClassVar[str] = "kvtc"
    command: ClassVar[str] = "kvfold fit MODEL TEXTS --codec kvtc"
    bundled: ClassVar[str] = "codec.safetensors"
    axes: ClassVar[dict[str, str]] = {
        "key_means": "LHD",
        "key_metrics": "LHDD",
        "key_directions": "bpr",
        "key_head_directions": "LHDD",
        "value_means": "LHV",
        "value_metrics": "LHVV",
        "value_directions": "cqs",
        "value_head_directions": "LHVV",
    }
    key_means: Tensor
    key_metrics: Tensor
    key_directions: Tensor
    key_head_directions: Tensor
    value_means: Tensor
    value_metrics: Tensor
    value_directions: Tensor
    value_head_directions: Tensor

    def problem(self) -> str | None:
        """As of all fits; and blocks that are not of all numbers."""
        found = super().problem()
        for side in ("key", "value") if found is None else ():
            directions, means = (
                getattr(self, f"{side}_{name}") for name in ("directions", "means")
            )
            if directions.shape[0] * directions.shape[1] != means.numel():
                found = f"{side}_directions has the shape {list(directions.shape)}"
        return found

    @property
    def width(self) -> int:
        """Numbers of an entry: channels of its key and of its value."""
        return self.key_means.shape[-1] + self.value_means.shape[-1]

    @cached_property
    def keys(self) -> Transform:
        """The transform of keys."""
        return Transform(
            self.key_means, self.key_metrics, self.key_directions, self.key_head_directions
        )

    @cached_property
    def values(self) -> Transform:
        """The transform of values."""
        return Transform(
            self.value_means, self.value_metrics, self.value_directions, self.value_head_directions
        )


class Codes(NamedTuple):
    """Codes `[rows, n]` of those directions of a block that are not all zero."""

    rows: list[int]
    codes: Tensor

    @property
    def small(self) -> Tensor:
        """Directions whose codes are all small, bool `[rows]`."""
        if not self.codes.numel():
            return torch.ones(len(self.rows), dtype=torch.bool)
        return (self.codes.amax(-1) <= SMALL) & (self.codes.amin(-1) >= -SMALL)

    def at(self, chosen: Tensor) -> Codes:
        """The directions that are `chosen`, bool `[rows]`."""
        rows = [row for row, own in zip(self.rows, chosen.tolist(), strict=True) if own]
        return Codes(rows, self.codes[chosen])


@dataclass(frozen=True, eq=False)
class Transform:
    """To the coefficients of a basis, and back; fields as of `Basis`."""

    means: Tensor
    metrics: Tensor
    directions: Tensor
    head_directions: Tensor

    def forward(self, heads: Sequence[Tensor], scope: Scope) -> list[Tensor]:
        """Coefficients `[streams, n]` of entries `[n, D]` of each KV head, layer by layer.

        One tensor for each block of layers, or for each head.
        """
        if scope == "head":
            return [
                directions.T @ measured.T
                for measured, directions in zip(self.measured(heads), self._of_heads(), strict=True)
            ]
        together = torch.cat(list(self.measured(heads)), -1)
        parts = together.split(self.directions.shape[1], -1)
        return [of.float().T @ part.T for part, of in zip(parts, self.directions, strict=True)]

    def back(self, blocks: Sequence[Codes], step: float, scope: Scope) -> list[Tensor]:
        """Entries `[n, D]` of each KV head, float32, from coefficients of `step` times the codes.

        Where the CPU multiplies bytes, a joint basis is rounded to 8 bits for small codes.
        """
        of_blocks, size = self.directions, self.means.shape[-1]
        if scope == "head":
            of_blocks = self._of_heads()
        numbers, columns = of_blocks.shape[0], of_blocks.shape[1]
        inverses = self._inverses.view(numbers, -1, size, size)
        means, found = self.means.view(numbers, columns), list[Tensor]()
        in_bytes = self._in_bytes if scope == "joint" and products.available() else None
        for i, (block, mean) in enumerate(zip(blocks, means, strict=True)):
            if in_bytes is None:
                made, exact = mean.repeat(block.codes.shape[1], 1), block
            else:
                small = block.small
                made, exact = in_bytes[i].products(*block, small, mean, step), block.at(~small)
            own = _turned(inverses[i], of_blocks[i][:, exact.rows])
            made.addmm_(exact.codes.float().T, own.T, alpha=step)
            found += made.split(size, -1)
        return found

    @cached_property
    def _inverses(self) -> Tensor:
        """Inverse metrics `[L, H, D, D]`."""
        inverses: Tensor = torch.linalg.inv(self.metrics)
        return inverses

    @cached_property
    def _in_bytes(self) -> list[ByteMatrix]:
        """The directions of each block, back from their metrics."""
        inverses = self._inverses.flatten(0, 1).chunk(len(self.directions))
        pairs = zip(inverses, self.directions, strict=True)
        return [ByteMatrix.of(_turned(inverse, directions)) for inverse, directions in pairs]

    def streams(self, counts: Sequence[int], scope: Scope) -> list[tuple[int, int]]:
        """Rows and columns of the coefficients of `forward`, for heads of `counts` entries."""
        blocks, _, rank = self.directions.shape
        if scope == "head":
            return [(self.means.shape[-1], count) for count in counts]
        return [(rank, counts[0])] * blocks

    def measured(self, heads: Sequence[Tensor]) -> Iterator[Tensor]:
        """Entries `[n, D]` of each KV head, less their means, in the metrics."""
        means, metrics = self.means.flatten(0, 1), self.metrics.flatten(0, 1)
        for head, mean, metric in zip(heads, means, metrics, strict=True):
            yield (head.float() - mean) @ metric

    def _of_heads(self) -> Tensor:
        return self.head_directions.flatten(0, 1)


def _turned(inverses: Tensor, directions: Tensor) -> Tensor:
    """Directions `[p, rows]`, float32, times the inverse metrics `[p / D, D, D]` of heads."""
    own = directions.float().unflatten(0, (-1, inverses.shape[-1]))
    turned: Tensor = (inverses @ own).flatten(0, 1)
    return turned
