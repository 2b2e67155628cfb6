# SPDX-License-Identifier: Apache-2.0
"""Recall for engines: codes of a layer's keys, and the entries that a query reads by them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.key_means import share_a_bias
from kvfold.kernels.mean_rotation import Rotate
from kvfold.kernels.per_token import RotatedKeys
from kvfold.kernels.recalled import by_codes, reads
from kvfold.methods.base import Method, parse
from kvfold.methods.recall import Recall
from kvfold.store.encoding import Unencoded


@dataclass(frozen=True, eq=False)
class KeyCodes:
    """Codes of one layer's keys `[B, H, T, D]`, behind RoPE; of all their bytes `nbytes`.

    The engine keeps the entries where it likes, and reads those of `slots` for each query.
    """

    method: Recall
    codes: RotatedKeys
    shape: tuple[int, int, int]  # B, H, D
    rotate: Rotate | None

    @classmethod
    def of(cls, method: Method | str, keys: Tensor, rotate: Rotate | None = None) -> KeyCodes:
        """Codes of `keys [B, H, T, D]` by "recall", or with options.

        `rotate(keys [B, H, n, D], positions [B, n])` is the layer's RoPE, and slots are positions:
        what the keys of a head share, as from a bias, is then kept beside their codes. Raises
        KvfoldError for other methods and shapes, and for keys that share a bias without `rotate`.
        """
        recall = parse(method)
        if not isinstance(recall, Recall):
            raise KvfoldError(f"codes of keys are recall's, not {recall}'s")
        if keys.ndim != 4 or not keys.numel():
            raise KvfoldError(f"keys are [B, H, T, D], none of them 0, not {[*keys.shape]}")
        rows, heads, _, size = keys.shape
        made = _coded(recall, keys, rotate, None)
        return cls(recall, made, (rows, heads, size), rotate)

    def extended(self, keys: Tensor) -> KeyCodes:
        """These and the codes of newer `keys [B, H, n, D]`; raises KvfoldError for other shapes."""
        rows, heads, size = self.shape
        if keys.ndim != 4 or keys.shape[:2] != (rows, heads) or keys.shape[3] != size:
            raise KvfoldError(f"newer keys are [{rows}, {heads}, n, {size}], not {[*keys.shape]}")
        made = _coded(self.method, keys, self.rotate, self.codes)
        return replace(self, codes=self.codes.extended(made))

    def slots(self, query: Tensor) -> Tensor:
        """Slots `[B, H, S, K]`, ascending, of the entries that `query [B, Hq, S, D]` reads.

        They are the `sinks` oldest, the `residual` newest, and of the others those found by codes:
        what `CompressedCache` reads of as many entries. All queries are newer than all keys. Raises
        KvfoldError for other shapes.
        """
        rows, heads, size = self.shape
        fits = query.ndim == 4 and query.shape[0] == rows and query.shape[3] == size
        if not fits or not query.numel() or query.shape[1] % heads:
            wanted = f"[{rows}, a multiple of {heads}, S, {size}]"
            raise KvfoldError(f"queries are {wanted}, not {[*query.shape]}")
        segments, length = rows * heads, self.codes.lengths[0]
        oldest = min(self.method.sinks, length)
        newest = max(oldest, length - self.method.residual)
        every = torch.arange(length, device=query.device)
        hot = torch.cat([every[:oldest], every[newest:]])
        grouped = query.reshape(segments, -1, *query.shape[2:])
        counts = [reads(self.method.read, length - len(hot))] * segments
        cold = by_codes(self.codes, [hot] * segments, counts, grouped)
        both = torch.cat([hot.expand(*cold.shape[:2], -1), cold], -1)
        slots: Tensor = both.sort(-1).values.unflatten(0, (rows, heads))
        return slots

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        return sum(each.numel() * each.element_size() for each in self.codes.tensors())


def _coded(
    method: Recall, keys: Tensor, rotate: Rotate | None, earlier: RotatedKeys | None
) -> RotatedKeys:
    """Codes of `keys [B, H, n, D]` that follow `earlier` ones."""
    segments = list(keys.flatten(0, 1))
    if rotate is None and any(share_a_bias(each) for each in segments):
        raise KvfoldError(
            "the keys of a head share a bias, which hides what they differ by: give the layer's "
            "RoPE as rotate"
        )
    first = 0 if earlier is None else earlier.lengths[0]
    positions = torch.arange(first, first + keys.shape[2], device=keys.device)
    among = Unencoded(segments, [positions] * len(segments))
    made = method.encoding().beside_rope(rotate).codes.keys(segments, None, earlier, among)
    assert isinstance(made, RotatedKeys)
    return made
