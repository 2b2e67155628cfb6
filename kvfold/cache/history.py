# SPDX-License-Identifier: Apache-2.0
"""Token ids that a cache has read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attention.padding import ColumnsRead

PARTS = 64  # newer tokens after which all parts are joined


@dataclass(frozen=True)
class Difference:
    """The first column at which a prompt differs from the tokens read, and its row.

    `masked`: the ids are the same there, but only one of the two is padding.
    """

    row: int
    column: int
    masked: bool


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

    def complete(self, seen: int) -> Tensor | None:
        """All ids `[B, seen]` as `whole`; None unless those of all `seen` columns are known."""
        return self.whole() if len(self) == seen else None

    def plus(self, ids: Tensor, start: int) -> History:
        """History with `ids [B, S]` of columns from `start` on, if all columns before are known."""
        parts = self.newer or (() if self.ids is None else (self.ids,))
        known = len(self.newer) + (0 if self.ids is None else self.ids.shape[1])
        if known != start or (start and len(parts[-1]) != len(ids)):
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

    def parts_from(self, input_ids: Tensor, mask: Tensor, read: ColumnsRead) -> Difference | None:
        """First difference of `input_ids [B, N]` from the columns `read`; None: no difference.

        `mask [B, N]` is 0 at padding, whose ids are not compared.
        """
        given = mask.to("cpu") != 0
        masked = read.contradicted(given).to("cpu")
        unlike = torch.zeros_like(masked)
        ids = self.whole()
        if ids is not None:
            known = min(masked.shape[1], ids.shape[1])
            other = ids[:, :known] != input_ids[:, :known].to("cpu")
            unlike[:, :known] = other & given[:, :known]
        differs = masked | unlike
        if not bool(differs.any()):
            return None
        column = int(differs.any(0).int().argmax())
        row = int(differs[:, column].int().argmax())
        return Difference(row, column, not unlike[row, column])

    @property
    def nbytes(self) -> int:
        """Bytes of the ids."""
        return sum(part.numel() * part.element_size() for part in self._parts)
