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


def test_a_frame_of_another_version_of_zstandard_is_read():
    pytest.importorskip("zstandard")
    assert decompressed(bytes.fromhex(OTHER_VERSION), len(TEXT), "zstd") == TEXT


def test_a_small_frame_of_much_is_refused_before_it_is_unpacked(monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    frame = compressed(bytes(2**22), "zstd")
    assert len(frame) < 2**10
    monkeypatch.setattr(zstandard, "ZstdDecompressor", None)
    with pytest.raises(ContextFileError, match="another length"):
        decompressed(frame, 100, "zstd")


def test_a_frame_of_much_that_claims_to_hold_nothing_is_not_unpacked():
    frame = compressed(bytes(2**24), "deflate")
    tracemalloc.start()
    with pytest.raises(ContextFileError, match="another length"):
        decompressed(frame, 0, "deflate")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert decompressed(compressed(b"", "deflate"), 0, "deflate") == b""
