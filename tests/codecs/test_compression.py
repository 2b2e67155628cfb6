# SPDX-License-Identifier: Apache-2.0
"""Compressed tensors: what comes back, frames of another version, damage."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from kvfold import ContextFileError
from kvfold.codecs.compression import (
    compressed,
    compressed_tensor,
    decompressed,
    decompressed_tensor,
)

BOTH = ("zstd", "deflate")
# Written by zstandard 0.22 (Zstandard 1.5.5), level 3, of TEXT.
OTHER_VERSION = (
    "28b52ffd60ee020d0200840300050a0f14191e23282d32373c41464b50555a5f64696e73787d8287"
    "8c91969ba0a5aaafb4b9bec3c8cdd2d7dce1e6ebf0f56b76666f6c64010032bb560a0a"
)
TEXT = bytes(range(0, 250, 5)) * 20 + b"kvfold"


@pytest.mark.parametrize("by", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.bool])
def test_tensors_come_back_bit_for_bit(by, dtype):
    for shape in ((), (0, 3), (4, 5)):
        given_tensor = torch.randint(0, 2, shape).to(dtype)
        frame = compressed_tensor(given_tensor, by)
        name = str(dtype).removeprefix("torch.")
        assert torch.equal(decompressed_tensor(frame, name, list(shape), by), given_tensor)
        if given_tensor.numel():
            with pytest.raises(ContextFileError, match="damaged"):
                decompressed_tensor(frame, name, [*shape, 2], by)


@pytest.mark.parametrize("by", BOTH)
@pytest.mark.parametrize("shape", [(0, 1), (1,), (3,), (2, 1)])
def test_tensors_of_any_strides_come_back(by, shape):
    repeated = torch.ones(1).as_strided(shape, (0,) * len(shape))
    for given_tensor in (repeated, torch.ones(4).as_strided(shape, (1, 0)[: len(shape)])):
        frame = compressed_tensor(given_tensor, by)
        assert torch.equal(decompressed_tensor(frame, "float32", list(shape), by), given_tensor)


def test_a_frame_of_another_version_of_zstandard_is_read():
    pytest.importorskip("zstandard")
    assert decompressed(bytes.fromhex(OTHER_VERSION), len(TEXT), "zstd") == TEXT


def as_before(tensor):
    """The frame that kvfold wrote before planes had blocks of their own."""
    zstandard = pytest.importorskip("zstandard")
    planes = tensor.reshape(-1, 1).view(torch.uint8).T.contiguous().numpy().tobytes()
    return torch.tensor(list(zstandard.ZstdCompressor(level=3).compress(planes)), dtype=torch.uint8)


def test_frames_of_before_are_read_and_before_reads_those_of_now():
    zstandard = pytest.importorskip("zstandard")
    given = torch.randn(3000, 20).bfloat16()
    back = decompressed_tensor(as_before(given), "bfloat16", given.shape, "zstd")
    assert torch.equal(back, given)
    frame = compressed_tensor(given, "zstd").numpy().tobytes()
    planes = zstandard.ZstdDecompressor().decompress(frame)
    assert planes == given.reshape(-1, 1).view(torch.uint8).T.contiguous().numpy().tobytes()


@pytest.mark.parametrize("count", [600 * 64, 1000 * 64, 2048 * 64])
def test_each_plane_takes_the_bytes_of_its_own_entropy(count):
    """Mantissas are near noise, exponents of few kinds: one Huffman table would cost a tenth."""
    pytest.importorskip("zstandard")
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(0)).bfloat16()
    bits = 0.0
    for plane in numbers.view(-1, 1).view(torch.uint8).T:
        part = torch.bincount(plane.int()).double() / count
        bits -= float((part * part.clamp(min=1e-9).log2()).sum())
    assert compressed_tensor(numbers, "zstd").numel() < 1.035 * count * bits / 8
    assert as_before(numbers).numel() > 1.07 * count * bits / 8


def test_a_small_frame_of_much_is_refused_before_it_is_unpacked(monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    frame = compressed([bytes(2**22)], "zstd")
    assert len(frame) < 2**10
    monkeypatch.setattr(zstandard, "ZstdDecompressor", None)
    with pytest.raises(ContextFileError, match="another length"):
        decompressed(frame, 100, "zstd")


def test_a_frame_of_much_that_claims_to_hold_nothing_is_not_unpacked():
    frame = compressed([bytes(2**24)], "deflate")
    tracemalloc.start()
    with pytest.raises(ContextFileError, match="another length"):
        decompressed(frame, 0, "deflate")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert decompressed(compressed([b""], "deflate"), 0, "deflate") == b""
