# SPDX-License-Identifier: Apache-2.0
"""Entropy coding of integer streams: small symbols share a byte, and bytes are compressed.

Streams of one largest magnitude m are coded together: each symbol is a digit in base 2m + 1, and as
many digits as fit make one byte. A compressor alone spends at least a bit on each byte.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from kvfold.errors import ContextFileError

Compressor = Literal["zstd", "deflate"]
MOST = 2**15 - 1  # the largest magnitude of a symbol
BYTE = 256
_NOTHING = torch.zeros(0, dtype=torch.uint8)


def compressor() -> Compressor:
    """Zstandard, or DEFLATE where the package `zstandard` is missing."""
    try:
        import zstandard  # noqa: F401
    except ImportError:
        return "deflate"
    return "zstd"


def compressed(data: bytes, by: Compressor, symbols: bool = False) -> bytes:
    """Bytes of one frame; `symbols` are independent, so that only their frequencies count."""
    if by == "deflate":
        kind = zlib.Z_HUFFMAN_ONLY if symbols else zlib.Z_DEFAULT_STRATEGY
        engine = zlib.compressobj(6, strategy=kind)
        return engine.compress(data) + engine.flush()
    import zstandard

    # Short repetitions cost more than the entropy of what they repeat.
    known = zstandard.ZstdCompressionParameters(
        compression_level=1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6
    )
    chosen = {"compression_params": known} if symbols else {"level": 3}
    return zstandard.ZstdCompressor(**chosen).compress(data)


def decompressed(data: bytes, size: int, by: Compressor) -> bytes:
    """The `size` bytes of a frame; raises ContextFileError if it does not hold them."""
    try:
        if by == "deflate":
            engine = zlib.decompressobj()
            found = engine.decompress(data, size)
            whole = engine.eof
        else:
            import zstandard

            found = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
            whole = True
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


@dataclass(frozen=True)
class CodedStreams:
    """Integer streams as bytes.

    Args:
        peaks: largest magnitude of each stream, int16 `[streams]`; streams of 0 take no bytes.
        sizes: bytes of each frame, int32, one for each magnitude, ascending.
        data: all frames, uint8.
    """

    peaks: Tensor
    sizes: Tensor
    data: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return self.peaks.nbytes + self.sizes.nbytes + self.data.nbytes


def encode(streams: Sequence[Tensor], by: Compressor) -> CodedStreams:
    """Codes 1-D streams of whole numbers up to 32767 in magnitude."""
    found = [int(each.abs().max()) if len(each) else 0 for each in streams]
    peaks = torch.tensor(found, dtype=torch.int16)
    frames = [
        compressed(_digits(torch.cat([streams[i] for i in of_peak]), peak), by, symbols=True)
        for peak, of_peak in _groups(peaks)
    ]
    sizes = torch.tensor([len(each) for each in frames], dtype=torch.int32)
    return CodedStreams(peaks, sizes, _bytes_of(b"".join(frames)))


def decode(
    coded: CodedStreams, counts: Sequence[int], by: Compressor
) -> Iterator[tuple[int, Tensor]]:
    """Each stream that is not all zero, by its number, int16; `counts` are the streams' lengths.

    Raises ContextFileError for streams that do not fit the counts.
    """
    groups = list(_groups(coded.peaks))
    if len(coded.peaks) != len(counts) or len(groups) != len(coded.sizes):
        raise ContextFileError("the streams of the codec do not fit the context's entries")
    data, start = coded.data.numpy().tobytes(), 0
    for (peak, of_peak), size in zip(groups, coded.sizes.tolist(), strict=True):
        lengths = [counts[i] for i in of_peak]
        frame = decompressed(data[start : start + size], _byte_count(sum(lengths), peak), by)
        start += size
        symbols = _symbols(frame, sum(lengths), peak)
        yield from zip(of_peak, symbols.split(lengths), strict=True)


def _groups(peaks: Tensor) -> Iterator[tuple[int, list[int]]]:
    """Streams of each magnitude above 0, ascending."""
    for peak in peaks.unique().tolist():
        if peak > 0:
            yield peak, (peaks == peak).nonzero()[:, 0].tolist()


def _per_byte(peak: int) -> int:
    """Symbols in a byte; 0 if one takes two bytes."""
    return int(math.log(BYTE, 2 * peak + 1) + 1e-9)


def _byte_count(symbols: int, peak: int) -> int:
    per = _per_byte(peak)
    return -(-symbols // per) if per else 2 * symbols


def _digits(symbols: Tensor, peak: int) -> bytes:
    per = _per_byte(peak)
    if not per:
        return symbols.to(torch.int16).numpy().tobytes()
    digits = torch.nn.functional.pad(symbols.to(torch.int16) + peak, (0, -len(symbols) % per))
    powers = torch.tensor([(2 * peak + 1) ** k for k in range(per)], dtype=torch.int16)
    return (digits.view(-1, per) * powers).sum(-1).to(torch.uint8).numpy().tobytes()


def _symbols(frame: bytes, count: int, peak: int) -> Tensor:
    per = _per_byte(peak)
    if not per:
        return torch.frombuffer(bytearray(frame), dtype=torch.int16)
    coded = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
    return _table(peak)[coded.int()].flatten()[:count]


@lru_cache(maxsize=BYTE)
def _table(peak: int) -> Tensor:
    """Symbols `[256, per byte]` of each byte, int16."""
    base, per = 2 * peak + 1, _per_byte(peak)
    powers = base ** torch.arange(per)
    return (torch.arange(BYTE)[:, None] // powers % base - peak).to(torch.int16)
