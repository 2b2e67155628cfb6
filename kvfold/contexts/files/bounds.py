# SPDX-License-Identifier: Apache-2.0
"""Bounds of what a file may say: told before memory is taken for it, whoever wrote the file.

Tokens, and all that is unpacked, are bounded by the file's size. What compresses more than that is
written as it is, so no file of kvfold's own is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kvfold.contexts.files.header import Header, LayerHeader

TIMES, FREE = 2**10, 2**26  # bytes that a file's byte may become, and those of any file
TOKENS_A_BYTE, FREE_TOKENS = 8, 2**20  # of a file in which the tokens are compressed, too
WIDEST = 8  # bytes of a number


def unpacked_bytes(file_size: int) -> int:
    """The most bytes that a file of this size may become."""
    return FREE + TIMES * file_size


def decoding_bytes(entries: int, numbers: int) -> int:
    """Bytes of coded entries while they are decoded: column, position, and float32 `numbers`."""
    return entries * (16 + 4 * numbers)


def nbytes(shape: Sequence[int], dtype: str | None = None) -> int:
    """Bytes of a tensor, where an axis without any entry counts as one: others are as long."""
    width = WIDEST if dtype is None else getattr(torch, dtype).itemsize
    return math.prod(max(size, 1) for size in shape) * int(width)


def excess(header: Header, shapes: dict[str, list[int]], file_size: int) -> str | None:
    """Size to which a file would unpack, in words, if it is too much; `shapes` are as stored."""
    streams = {} if header.codec is None else header.codec.streams
    total = 0
    for name in (*shapes, *header.same_as.values()):  # each other name is a tensor of its own
        total += nbytes(shapes.get(name, []))
        if name in streams:
            total += nbytes(streams[name].shape, streams[name].dtype)
    if total > unpacked_bytes(file_size):
        return f"its {file_size:,} bytes would become {total:,}"
    tokens = streams["ids"].shape if "ids" in streams else shapes.get("ids", [])
    if tokens != [header.seen] or header.seen > FREE_TOKENS + TOKENS_A_BYTE * file_size:
        return f"it does not hold the {header.seen:,} tokens that it names"
    return None


def contradiction(header: Header) -> str | None:
    """The first number that no context of as many tokens has; None if there is none."""
    indices = [part.index for part in header.layers] + [part.index for part in header.others]
    if sorted(indices) != list(range(len(indices))):
        return "its layers are not numbered one by one"
    for layer in header.layers:
        wrong = _of_layer(layer, header.seen)
        if wrong is not None:
            return f"layer {layer.index} has {wrong}"
    return None if header.session is None else header.session.contradiction(header.seen)


def _of_layer(layer: LayerHeader, seen: int) -> str | None:
    if layer.seen != seen:
        return f"seen {layer.seen:,} tokens of {seen:,}"
    counts = [*layer.kept, layer.dead, layer.new, layer.evicted_at, layer.settled or 0]
    if max(counts) > seen or layer.first_new + layer.new > seen:
        return f"more entries than its {seen:,} tokens"
    return None
