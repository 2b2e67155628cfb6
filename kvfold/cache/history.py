# SPDX-License-Identifier: Apache-2.0
"""The token ids that a cache has read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PARTS = 64  # newer tokens after which all parts are joined


@dataclass(frozen=True)
class Difference:
    """The first column at which a prompt differs from the tokens read, and its row."""

    row: int
    column: int


@dataclass(frozen=True)
class History:
    """Ids `[B, n]` of the first `n` columns read, padding included: `ids`, then `newer` tokens.

    Columns from `n` on were read by forwards that had no ids (`inputs_embeds`), or went past the
    model that the cache was made for: they cannot be compared.
    """

    ids: Tensor | None = None
    newer: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        """Number of columns whose ids are known."""
        return len(self.newer) + (0 if self.ids is None else self.ids.shape[1])

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.newer if self.ids is None else (self.ids, *self.newer)

    def whole(self) -> Tensor | None:
        """All ids `[B, n]`, int32 in host memory; None if none are known."""
        parts = [part.to("cpu", torch.int32) for part in self._parts]
        return torch.cat(parts, 1) if parts else None

    def plus(self, ids: Tensor, start: int) -> History:
        """History with `ids [B, S]` of columns from `start` on, if all columns before are known."""
        if len(self) != start or (start and len(self._parts[-1]) != len(ids)):
            return self
        longer = History(self.ids, (*self.newer, ids.to(torch.int32, copy=True)))
        # Joining waits for a GPU, so it happens at prompts and every PARTS tokens only.
        return longer.compact() if ids.shape[1] > 1 or len(longer.newer) == PARTS else longer

    def compact(self) -> History:
        """History in one tensor of its own, 4 bytes a token in host memory."""
        return History(self.whole())

    def crop(self, length: int) -> History:
        """The history of the first `length` columns."""
        if len(self) <= length:
            return self
        ids = self.whole()
        assert ids is not None
        return History(ids[:, :length].clone())

    def index(self, rows: Callable[[Tensor], Tensor]) -> History:
        """Applies `rows`, a selection along the batch axis."""
        ids = None if self.ids is None else rows(self.ids)
        return History(ids, tuple(rows(part) for part in self.newer))

    def parts_from(
        self, input_ids: Tensor, mask: Tensor, tokens: Tensor | None, seen: int
    ) -> Difference | None:
        """First difference of `input_ids [B, N]` from the `seen` columns read; None: no difference.

        `mask [B, N]` is 0 at padding, whose ids are not compared; `tokens [B, seen]` is False at
        columns that were padding when they were read, None if none were.
        """
        shared = min(seen, input_ids.shape[1])
        given = mask[:, :shared].to("cpu") != 0
        differs = ~given if tokens is None else given != tokens[:, :shared].to("cpu")
        ids = self.whole()
        if ids is not None:
            known = min(shared, ids.shape[1])
            unlike = ids[:, :known] != input_ids[:, :known].to("cpu")
            differs[:, :known] |= unlike & given[:, :known]
        if not bool(differs.any()):
            return None
        column = int(differs.any(0).int().argmax())
        return Difference(int(differs[:, column].int().argmax()), column)

    @property
    def nbytes(self) -> int:
        """Bytes of the ids."""
        return sum(part.numel() * part.element_size() for part in self._parts)
