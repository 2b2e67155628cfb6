# SPDX-License-Identifier: Apache-2.0
"""The logical sequence of a layer: its length, and which of its columns are tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kvfold.kernels.gather import pick


@dataclass
class LogicalSequence:
    """`seen` columns, padding included; `valid [B, N]` is False at padding, None without any."""

    seen: int = 0
    valid: Tensor | None = None

    def tokens(self) -> Tensor | None:
        """Bool mask `[B, N]` of the token columns; those without a mask yet count as tokens."""
        if self.valid is None:
            return None
        return F.pad(self.valid, (0, self.seen - self.valid.shape[1]), value=True)

    def per_row(self, rows: int, device: torch.device) -> Tensor:
        """Number of tokens of each row `[B]`, without padding."""
        tokens = self.tokens()
        if tokens is None:
            return _each(self.seen, rows, device)
        return tokens.sum(-1)

    def real(self, columns: Tensor) -> Tensor:
        """`columns [B, H, T]` with −1 in place of padding."""
        tokens = self.tokens()
        if tokens is None:
            return columns
        inside = tokens[:, None].expand(-1, columns.shape[1], -1)
        return columns.masked_fill(~inside.gather(2, columns.clamp(min=0)), -1)

    def positions(self, columns: Tensor) -> Tensor:
        """Positions of `columns [B, …]`; −1 stays."""
        tokens = self.tokens()
        if tokens is None:
            return columns
        count = tokens.cumsum(-1) - 1
        if columns.dim() == 3:
            count = count[:, None].expand(-1, columns.shape[1], -1)
        return pick(count, columns, -1)

    def columns(self, positions: Tensor) -> Tensor:
        """Columns of `positions [B, H, T]`; −1 stays. The inverse of `positions`."""
        tokens = self.tokens()
        if tokens is None:
            return positions
        first = tokens.byte().argsort(dim=-1, descending=True, stable=True)
        first = first[:, None].expand(-1, positions.shape[1], -1)
        return pick(first, positions, -1)

    def grow(self, new: int) -> None:
        """Notes `new` columns, tokens unless a mask or `hide` says otherwise."""
        self.seen += new

    def note_mask(self, valid: Tensor | None) -> None:
        """Takes the mask `[B, N]` of all columns; None: all are tokens."""
        self.valid = valid

    def hide(self, padding: Tensor) -> None:
        """Notes that the columns at which `padding [B, ≥ seen]` is true are no tokens."""
        tokens, others = self.tokens(), ~padding[:, : self.seen]
        self.valid = others if tokens is None else tokens & others

    def crop(self, count: int) -> None:
        """Drops the last `count` columns."""
        self.seen -= count
        if self.valid is not None:
            left = self.valid[:, : self.seen]
            self.valid = None if bool(left.all()) else left.clone()

    def index(self, rows: Callable[[Tensor], Tensor]) -> None:
        """Applies `rows`, a selection along the batch axis."""
        if self.valid is not None:
            self.valid = rows(self.valid)


@lru_cache(maxsize=2)
def _each(seen: int, rows: int, device: torch.device) -> Tensor:
    """Tensor `[rows]` of `seen`, shared by all layers of a forward: read only."""
    return torch.full((rows,), seen, device=device)
