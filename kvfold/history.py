# SPDX-License-Identifier: Apache-2.0
"""The token ids that a cache has read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """The first column at which a prompt parts from what was read, and in which row."""

    row: int
    column: int


@dataclass(frozen=True)
class History:
    """Ids `[B, n]` of the first `n` columns read, padding included.

    Columns from `n` on were read by forwards that nobody told the cache the ids of, such as a bare
    `model(...)`: they cannot be compared.
    """

    ids: Tensor | None = None

    def compact(self) -> History:
        """A copy of its own, 4 bytes a token in host memory."""
        return History(None if self.ids is None else self.ids.to("cpu", torch.int32, copy=True))

    def crop(self, length: int) -> History:
        """The history of the first `length` columns."""
        if self.ids is None or self.ids.shape[1] <= length:
            return self
        return History(self.ids[:, :length].clone())

    def index(self, rows: Callable[[Tensor], Tensor]) -> History:
        """Applies `rows`, a selection along the batch axis."""
        return self if self.ids is None else History(rows(self.ids))

    def parts_from(
        self, input_ids: Tensor, mask: Tensor, tokens: Tensor | None, seen: int
    ) -> Difference | None:
        """Where `input_ids [B, N]` first differ from the `seen` columns read; None: nowhere.

        `mask [B, N]` is 0 at padding, whose ids are not compared; `tokens [B, seen]` is False at
        what was padding when it was read, None where nothing was.
        """
        shared = min(seen, input_ids.shape[1])
        given = mask[:, :shared].to("cpu") != 0
        differs = ~given if tokens is None else given != tokens[:, :shared].to("cpu")
        if self.ids is not None:
            known = min(shared, self.ids.shape[1])
            unlike = self.ids[:, :known].to("cpu") != input_ids[:, :known].to("cpu")
            differs[:, :known] |= unlike & given[:, :known]
        if not bool(differs.any()):
            return None
        column = int(differs.any(0).int().argmax())
        return Difference(int(differs[:, column].int().argmax()), column)

    @property
    def nbytes(self) -> int:
        """Bytes of the ids."""
        return 0 if self.ids is None else self.ids.numel() * self.ids.element_size()
