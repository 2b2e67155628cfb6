# SPDX-License-Identifier: Apache-2.0
"""Pruned keys: each head drops the channels that its queries use least (ThinK).

Xu et al., arXiv 2407.21018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.kernels.views import Encoded, Flat, Named
from kvfold.store.encoding import Encode, QueriedKeys, Unencoded


def channel_scores(seen: QueriedKeys, queries: int) -> Tensor:
    """Channel scores `[B, H, D]`, float32: mean q² of the last `queries` queries times mean k².

    The mean of q² also runs over the query heads of a group; padding does not count.
    """
    assert seen.queries is not None and seen.query_positions is not None
    of_queries = _mean_square(
        seen.queries[:, :, -queries:], seen.query_positions[:, None, -queries:] >= 0
    )
    return seen.group_mean(of_queries) * _mean_square(seen.keys, seen.positions >= 0)


def _mean_square(rows: Tensor, real: Tensor) -> Tensor:
    """Mean squares `[B, H, D]` of `rows [B, H, n, D]` over the n where `real [B, 1 or H, n]`."""
    squares = rows.float().square().masked_fill(~real[..., None], 0.0)
    return squares.sum(2) / real.sum(2).clamp(min=1)[..., None]


def kept_channels(scores: Tensor, ratio: float) -> Tensor:
    """Channels `[…, D']`, int32, ascending: all but the ⌊D·ratio⌋ of lowest score `[…, D]`.

    Of equal scores the earlier channel is kept.
    """
    size = scores.shape[-1]
    best = scores.argsort(dim=-1, descending=True, stable=True)
    return best[..., : size - int(size * ratio)].sort(dim=-1).values.int()


@dataclass(frozen=True)
class PrunedKeys:
    """Kept channels of keys: `kept [sum of lengths, D']`, their `channels [segments, D']`, int32.

    `size` is the head size D before pruning.
    """

    kept: Flat
    channels: Tensor
    size: int

    @classmethod
    def of(cls, segments: list[Tensor], channels: Tensor) -> PrunedKeys:
        """From segments' keys `[n, D]` and their channels to keep `[segments, D']`, ascending."""
        pairs = zip(segments, channels.long(), strict=True)
        kept = Flat.of([keys[:, of_segment] for keys, of_segment in pairs])
        return cls(kept, channels, segments[0].shape[1])

    @property
    def lengths(self) -> list[int]:
        """Keys of each segment."""
        return self.kept.lengths

    @property
    def rows(self) -> Tensor:
        """All keys `[sum of lengths, D]`, with zeros in pruned channels."""
        return torch.cat(self.segments)

    @property
    def segments(self) -> tuple[Tensor, ...]:
        """Keys `[n, D]` of every segment, with zeros in pruned channels."""
        return tuple(self.segment(i) for i in range(len(self.lengths)))

    def segment(self, i: int) -> Tensor:
        """Keys `[n, D]` of segment i, with zeros in pruned channels."""
        kept = self.kept.segment(i)
        keys = kept.new_zeros(len(kept), self.size)
        return keys.index_copy_(1, self.channels[i].long(), kept)

    def extended(self, new: PrunedKeys) -> PrunedKeys:
        """Each segment followed by that of `new`; their channels differ only if it was empty."""
        return PrunedKeys(self.kept.extended(new.kept), new.channels, self.size)

    def select(self, segments: list[int]) -> PrunedKeys:
        """A copy of these segments, in this order."""
        return PrunedKeys(self.kept.select(segments), self.channels[segments], self.size)

    def tensors(self) -> list[Tensor]:
        """Kept channels of the keys, and their indices."""
        return [self.kept.rows, self.channels]

    def named(self) -> Named:
        """Kept channels and their indices, one tensor for each segment, as views."""
        return {"kept": list(self.kept.segments), "channels": list(self.channels)}


@dataclass(frozen=True)
class Pruning(Encode):
    """ThinK's encoding: when a prefill ends, all keys but the `recent` newest are pruned.

    The share `ratio` of the channels is dropped, by scores of the last `queries` queries. A
    segment's channels are chosen once, with its first pruned keys. Raises KvfoldError for a ratio
    outside [0, 1), a negative `recent`, and fewer than 1 query.
    """

    ratio: float = 0.4
    recent: int = 32
    queries: int = 32
    raw: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise KvfoldError(f"the ratio of channels to prune is in [0, 1), not {self.ratio}")
        if self.recent < 0:
            raise KvfoldError(f"the recent keys that stay whole are 0 or more, not {self.recent}")
        if self.queries < 1:
            raise KvfoldError(f"channels are scored by at least 1 query, not {self.queries}")

    def key_count(self, entries: int, encoded: int, decoding: bool) -> int:
        return encoded if decoding else max(encoded, entries - self.recent)

    def value_count(self, entries: int, encoded: int, decoding: bool) -> int:
        return self.key_count(entries, encoded, decoding)

    def keys(
        self,
        segments: list[Tensor],
        seen: QueriedKeys | None,
        earlier: Encoded | None,
        among: Unencoded | None = None,
    ) -> Encoded:
        assert seen is not None
        channels = kept_channels(channel_scores(seen, self.queries), self.ratio).flatten(0, 1)
        if isinstance(earlier, PrunedKeys):
            chosen = torch.tensor(earlier.lengths, device=channels.device)[:, None] > 0
            channels = torch.where(chosen, earlier.channels, channels)
        return PrunedKeys.of(segments, channels)

    def keys_from(self, parts: Named, size: int) -> Encoded:
        return PrunedKeys(Flat.of(parts["kept"]), torch.stack(parts["channels"]), size)
