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


def compressed(planes: Sequence[bytes], by: Compressor) -> bytes:
    """Bytes of one frame, which unpacks to the planes one after the other.

    Zstandard has one Huffman table a block of up to 128 KiB: no block holds bytes of two planes.
    Short matches cost more than the literals that they replace.
    """
    if by == "deflate":
        return zlib.compress(b"".join(planes))
    import zstandard

    size = sum(map(len, planes))
    fast = zstandard.ZstdCompressionParameters.from_level(1, source_size=size, min_match=7)
    engine = zstandard.ZstdCompressor(compression_params=fast).compressobj(size=size)
    made = list[bytes]()
    for plane in planes:
        made += engine.compress(plane), engine.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return b"".join([*made, engine.flush()])


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
    # An empty tensor, or one of a number, may have strides that no view takes.
    whole = tensor.reshape(-1, 1).clone(memory_format=torch.contiguous_format)
    numbers = whole.view(torch.uint8)
    return _bytes_of(compressed([plane.numpy().tobytes() for plane in numbers.T], by))


def decompressed_tensor(frame: Tensor, dtype: str, shape: Sequence[int], by: Compressor) -> Tensor:
    """The tensor of a frame; raises ContextFileError for a frame of another size."""
    kind: torch.dtype = getattr(torch, dtype)
    count = math.prod(shape)
    data = decompressed(frame.numpy().tobytes(), count * kind.itemsize, by)
    numbers = _bytes_of(data).view(kind.itemsize, count).T.reshape(-1)
    return numbers.view(kind).view(tuple(shape))


def _bytes_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING
