# SPDX-License-Identifier: Apache-2.0
"""Coded integer streams: what comes back, sizes beside the entropy, damage."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvfold.codecs import ans
from kvfold.codecs.symbols import CodedStreams, decode, encode, expected_bytes
from kvfold.errors import ContextFileError


@pytest.fixture(params=["C++", "numpy"], scope="module", autouse=True)
def _decoder(request):
    """Lanes are decoded in C++, and without it."""
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "numpy":
            patched.setattr(ans, "library", lambda: None)
        elif ans.library() is None:
            pytest.skip("no C++ compiler")
        yield


def decoded(coded: CodedStreams, counts: list[int]) -> list[list[int]]:
    found = [torch.zeros(count, dtype=torch.int16) for count in counts]
    for number, stream in decode(coded, counts):
        found[number] = stream
    return [each.tolist() for each in found]


def encoded(streams: list[list[int]]) -> CodedStreams:
    return encode([torch.tensor(each, dtype=torch.float32) for each in streams])


@pytest.mark.slow
@given(
    st.lists(
        st.sampled_from([0, 1, 2, 7, 40, 127, 128, 255, 5000, 32512]).flatmap(
            lambda most: st.lists(st.integers(-most, most), max_size=20)
        ),
        max_size=8,
    )
)
def test_streams_come_back(streams):
    assert decoded(encoded(streams), [len(each) for each in streams]) == streams


@pytest.mark.slow
def test_many_lanes_come_back():
    draws = torch.Generator().manual_seed(0)
    sizes = torch.linspace(-3, 8.5, 40).exp()
    streams = [(torch.randn(100_000 + i, generator=draws) * s).round() for i, s in enumerate(sizes)]
    found = dict(decode(encode(streams), [len(each) for each in streams]))
    assert all(torch.equal(found[i].float(), each) for i, each in enumerate(streams) if each.any())


def entropy_bytes(stream: Tensor) -> float:
    counts = Counter(stream.tolist())
    return -sum(n * math.log2(n / len(stream)) for n in counts.values()) / 8


@pytest.mark.slow
@pytest.mark.parametrize("deviation", [0.2, 0.3, 0.6, 2.0, 20.0])
def test_bytes_are_near_the_entropy(deviation):
    draw = torch.randn(400_000, generator=torch.Generator().manual_seed(0)) * deviation
    streams = list(draw.round().view(40, -1))
    least = entropy_bytes(draw.round())
    assert least < encode(streams).nbytes < 1.02 * least + 4 * ans.MOST_LANES
    assert expected_bytes(streams) == pytest.approx(encode(streams).nbytes, rel=0.01, abs=4096)


def test_streams_of_different_sizes_have_tables_of_their_own():
    draws = torch.Generator().manual_seed(0)
    streams = [
        (torch.randn(4000, generator=draws) * size).round() for size in torch.logspace(-1, 1, 100)
    ]
    least = sum(map(entropy_bytes, streams))
    assert encode(streams).nbytes < 1.03 * least


def test_streams_of_zeros_take_a_byte_each():
    coded = encode([torch.zeros(1000)] * 5)
    assert coded.nbytes == 5 and decoded(coded, [1000] * 5) == [[0] * 1000] * 5


STREAMS = [list(range(-50, 50)) * 9, [1, 0, -1] * 50, [300, -7, 0]]
COUNTS = [len(each) for each in STREAMS]


@pytest.mark.parametrize("counts", [[900, 150], [899, 150, 3], [901, 150, 3], [*COUNTS, 1]])
def test_other_counts_are_refused(counts):
    with pytest.raises(ContextFileError):
        decoded(encoded(STREAMS), counts)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CodedStreams)])
def test_every_damaged_tensor_is_refused_or_no_crash(name):
    """Checksums guard files; without them, a changed number gives other streams or an error."""
    coded, draws = encoded(STREAMS), random.Random(0)
    whole: Tensor = getattr(coded, name)
    for number in range(60):
        damaged = whole.clone()
        if number % 2:
            damaged = damaged[: draws.randrange(len(damaged))]
        else:
            damaged[draws.randrange(len(damaged))] ^= 1 << draws.randrange(8)
        with suppress(ContextFileError):
            found = decoded(dataclasses.replace(coded, **{name: damaged}), COUNTS)
            assert found != STREAMS and list(map(len, found)) == COUNTS


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CodedStreams)])
def test_tensors_of_another_shape_or_dtype_are_refused(name):
    coded = encoded(STREAMS)
    part: Tensor = getattr(coded, name)
    for other in (part[:, None], part[:, None][:, :0], part.double()):
        with pytest.raises(ContextFileError, match="another shape"):
            decoded(dataclasses.replace(coded, **{name: other}), COUNTS)
