# SPDX-License-Identifier: Apache-2.0
"""Lossless frames of bytes: Zstandard, or DEFLATE where it is missing."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kvfold.errors import ContextFileError

Compressor = Literal["zstd", "deflate"]
_NOTHING = torch.zeros(0, dtype=torch.uint8)


def compressor() -> Compressor:
    """Zstandard, or DEFLATE where the package `zstandard` is missing."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        return "deflate"
    return "zstd"


def compressed(data: bytes, by: Compressor) -> bytes:
    """Bytes of one frame."""
    if by == "deflate":
        return zlib.compress(data)
    import zstandard

    return zstandard.ZstdCompressor(level=3).compress(data)


def decompressed(data: bytes, size: int, by: Compressor) -> bytes:
    """The `size` bytes of a frame; raises ContextFileError if it does not hold them."""
    try:
        if by == "deflate":
            engine = zlib.decompressobj()
            found = engine.decompress(data, max(size, 1))  # 0 would be no bound
            whole = engine.eof
        else:
            import zstandard

            # A small frame may unpack to any size: what it will be is read first.
            whole = zstandard.get_frame_parameters(data).content_size == size
            found = zstandard.ZstdDecompressor().decompress(data) if whole else b""
    except ImportError as problem:
        raise ContextFileError(
            "the file is compressed by Zstandard: pip install 'kvfold[codec]'"
        ) from problem
    except Exception as problem:  # zlib.error and ZstdError have no common class
        raise ContextFileError(f"a compressed stream is damaged: {problem}") from problem
    if len(found) != size or not whole:
        raise ContextFileError("a compressed stream is damaged: it has another length")
    return found


def compressed_tensor(tensor: Tensor, by: Compressor) -> Tensor:
    """A CPU tensor as a frame `[bytes]`, uint8: the first bytes of all numbers, then the next."""
    numbers = tensor.reshape(-1, 1).view(torch.uint8)
    return _bytes_of(compressed(numbers.T.contiguous().numpy().tobytes(), by))


def decompressed_tensor(frame: Tensor, dtype: str, shape: Sequence[int], by: Compressor) -> Tensor:
    """The tensor of a frame; raises ContextFileError for a frame of another size."""
    kind: torch.dtype = getattr(torch, dtype)
    count = math.prod(shape)
    data = decompressed(frame.numpy().tobytes(), count * kind.itemsize, by)
    numbers = _bytes_of(data).view(kind.itemsize, count).T.reshape(-1)
    return numbers.view(kind).view(tuple(shape))


def _bytes_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING
