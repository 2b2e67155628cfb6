# SPDX-License-Identifier: Apache-2.0
"""Four bits a number in files, as KIVI has them in memory: no basis, and little to compute.

Keys have a scale and a minimum for each channel of 32 entries, values for each 32 channels of an
entry. Source: Liu et al., section 3 (arXiv 2402.02750).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvfold.errors import CodecRefusal, ContextFileError
from kvfold.kernels.packing import dequantize, pack, quantize, unpack

BITS, GROUP = 4, 32
PER_WORD = 32 // BITS
PARTS = ("codes", "scale", "minimum", "whole")  # of all heads, one after the other


def encode(heads: Sequence[Tensor], by_channel: bool) -> dict[str, Tensor]:
    """Quantizes keys (`by_channel`) or values `[n, D]` of each KV head.

    The newest entries that fill no group of 32 stay whole. Raises CodecRefusal for head sizes that
    differ or fill no words, and for numbers that are not finite.
    """
    size, *others = {each.shape[-1] for each in heads}
    if others:
        raise CodecRefusal(
            "the layers differ in their head sizes, and kivi4 packs all heads together: save the "
            'context with codec="zstd"'
        )
    if size % PER_WORD or size % _channels(size):
        raise CodecRefusal(
            f"kivi4 packs {PER_WORD} channels into a word, in groups of {GROUP}, and this model's "
            f'heads have {size}: save the context with codec="zstd"'
        )
    old = torch.cat([each[: _grouped(len(each))] for each in heads])
    if not bool(old.isfinite().all()):
        raise CodecRefusal('keys or values are not finite: save the context with codec="zstd"')
    codes, scale, minimum = quantize(_groups(old, by_channel), BITS, 1 if by_channel else 2)
    newest = torch.cat([each[_grouped(len(each)) :] for each in heads])
    return dict(
        zip(PARTS, (pack(codes.view(old.shape), BITS, 1), scale, minimum, newest), strict=True)
    )


def decode(parts: Mapping[str, Tensor], counts: Sequence[int], by_channel: bool) -> list[Tensor]:
    """Keys or values `[n, D]` of heads with `counts` entries, in the dtype that they had.

    Raises ContextFileError for parts that do not fit these entries.
    """
    words, scale, minimum, whole = (parts[name] for name in PARTS)
    grouped = [_grouped(count) for count in counts]
    rest = [count - old for count, old in zip(counts, grouped, strict=True)]
    # Scales of another shape would be spread over all codes.
    old, size = sum(grouped), whole.shape[-1]
    of_group = (old // GROUP, 1, size) if by_channel else (old, size // _channels(size), 1)
    fits = words.shape == (old, size // PER_WORD) and scale.shape == minimum.shape == of_group
    if not fits or whole.shape != (sum(rest), size):
        raise ContextFileError("the codes of the codec do not fit the context's entries")
    codes = _groups(unpack(words, BITS, 1), by_channel)
    numbers = dequantize(codes, scale, minimum).view(old, size)
    pairs = zip(numbers.split(grouped), whole.split(rest), strict=True)
    return [torch.cat(pair) for pair in pairs]


def _groups(rows: Tensor, by_channel: bool) -> Tensor:
    """Rows `[n, D]` as groups: 32 entries of each channel, or 32 channels of each entry."""
    count, size = rows.shape
    if by_channel:
        return rows.view(count // GROUP, GROUP, size)
    return rows.view(count, size // _channels(size), _channels(size))


def _grouped(count: int) -> int:
    return count - count % GROUP


def _channels(size: int) -> int:
    return min(GROUP, size)
