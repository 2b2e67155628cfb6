# SPDX-License-Identifier: Apache-2.0
"""Coded integer streams: what comes back, sizes beside the entropy, damage."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.codecs import symbols
from kvfold.codecs.symbols import (
    CodedStreams,
    compressed_tensor,
    decode,
    decompressed_tensor,
    encode,
)
from kvfold.errors import ContextFileError

BOTH = ("zstd", "deflate")


def decoded(coded: CodedStreams, counts: list[int], by: symbols.Compressor) -> list[list[int]]:
    found = [torch.zeros(count, dtype=torch.int16) for count in counts]
    for number, stream in decode(coded, counts, by):
        found[number] = stream
    return [each.tolist() for each in found]


@given(
    st.lists(
        st.sampled_from([0, 1, 2, 7, 40, 127, 128, 5000, 32767]).flatmap(
            lambda most: st.lists(st.integers(-most, most), max_size=20)
        ),
        max_size=8,
    )
)
def test_streams_come_back(streams):
    for by in BOTH:
        coded = encode([torch.tensor(each, dtype=torch.float32) for each in streams], by)
        assert decoded(coded, [len(each) for each in streams], by) == streams


def entropy_bytes(stream: Tensor) -> float:
    counts = Counter(stream.tolist())
    return -sum(n * math.log2(n / len(stream)) for n in counts.values()) / 8


@pytest.mark.parametrize("by", BOTH)
@pytest.mark.parametrize("deviation", [0.3, 0.6, 2.0, 20.0])
def test_bytes_are_near_the_entropy(deviation, by):
    draw = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * deviation
    coded, least = encode([draw.round()], by), entropy_bytes(draw.round())
    assert least < coded.nbytes < (1.15 if deviation < 0.5 else 1.04) * least


def test_streams_of_zeros_take_their_peaks_only():
    coded = encode([torch.zeros(1000)] * 5, "zstd")
    assert coded.nbytes == 10 and decoded(coded, [1000] * 5, "zstd") == [[0] * 1000] * 5


@pytest.mark.parametrize("by", BOTH)
def test_damaged_streams_are_refused(by):
    coded = encode([torch.arange(-50, 50.0).repeat(9)], by)
    cut = CodedStreams(coded.peaks, coded.sizes, coded.data[:-3])
    for damaged, counts in ((cut, [900]), (coded, [899]), (coded, [901]), (coded, [900, 1])):
        with pytest.raises(ContextFileError):
            decoded(damaged, counts, by)


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
