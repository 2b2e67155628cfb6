# SPDX-License-Identifier: Apache-2.0
"""Recall for engines: codes of a layer's keys, and the entries that a query reads by them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.per_token import RotatedKeys
from kvfold.kernels.recalled import by_codes, reads
from kvfold.methods.base import Method, parse
from kvfold.methods.recall import Recall


@dataclass(frozen=True, eq=False)
class KeyCodes:
    """Codes of one layer's keys `[B, H, T, D]`, behind RoPE; of all their bytes `nbytes`.

    The engine keeps the entries where it likes, and reads those of `slots` for each query.
    """

    method: Recall
    codes: RotatedKeys
    rows: int

    @classmethod
    def of(cls, method: Method | str, keys: Tensor) -> KeyCodes:
        """Codes of `keys [B, H, T, D]` by "recall", or with options; KvfoldError for others."""
        recall = parse(method)
        if not isinstance(recall, Recall):
            raise KvfoldError(f"codes of keys are recall's, not {recall}'s")
        return cls(recall, _codes(recall, keys), len(keys))

    def extended(self, keys: Tensor) -> KeyCodes:
        """These and the codes of newer `keys [B, H, n, D]`."""
        return replace(self, codes=self.codes.extended(_codes(self.method, keys)))

    def slots(self, query: Tensor) -> Tensor:
        """Slots `[B, H, S, K]`, ascending, of the entries that `query [B, Hq, S, D]` reads.

        They are the `sinks` oldest, the `residual` newest, and of the others those found by codes:
        what `CompressedCache` reads of as many entries. All queries are newer than all keys.
        """
        segments, length = len(self.codes.lengths), self.codes.lengths[0]
        oldest = min(self.method.sinks, length)
        newest = max(oldest, length - self.method.residual)
        every = torch.arange(length, device=query.device)
        hot = torch.cat([every[:oldest], every[newest:]])
        grouped = query.reshape(segments, -1, *query.shape[2:])
        counts = [reads(self.method.read, length - len(hot))] * segments
        cold = by_codes(self.codes, [hot] * segments, counts, grouped)
        both = torch.cat([hot.expand(*cold.shape[:2], -1), cold], -1)
        slots: Tensor = both.sort(-1).values.unflatten(0, (self.rows, -1))
        return slots

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        return sum(each.numel() * each.element_size() for each in self.codes.tensors())


def _codes(method: Recall, keys: Tensor) -> RotatedKeys:
    made = method.encoding().keys(list(keys.flatten(0, 1)), None, None)
    return made.codes
