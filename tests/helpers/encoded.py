# SPDX-License-Identifier: Apache-2.0
"""Random entries, every encoding of them, and what they decode to."""

import pytest
import torch

from kvfold.kernels.key_means import KeyMeans
from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.views import Flat
from kvfold.store.paired import Pairing
from kvfold.store.pruned import PrunedKeys

SIZE, GROUP = 32, 16


def entries(lengths, dtype=torch.float32, seed=0, size=SIZE):
    """Segments `[n, size]` whose channels differ in size and offset, as keys' do."""
    generator = torch.Generator().manual_seed(seed)
    loud = torch.linspace(0.1, 9, size)
    return [
        (torch.randn(n, size, generator=generator) * loud + loud.flip(0)).to(dtype) for n in lengths
    ]


def of_pruned(segments):
    channels = torch.stack([torch.arange(i, 20 + i) for i in range(len(segments))]).int()
    return PrunedKeys.of(segments, channels)


def partners_of(segments):
    noise = entries([len(segment) for segment in segments], segments[0].dtype, seed=7)
    return [segment + 0.3 * other for segment, other in zip(segments, noise, strict=True)]


def beside_means(segments):
    """Keys at positions of their own, of which each segment's have a mean that grows with these."""
    lengths = [len(segment) for segment in segments]
    rows = torch.arange(1.0, len(segments) + 1)[:, None].expand(-1, SIZE).clone()
    places = Flat(torch.arange(sum(lengths))[:, None].int(), lengths)
    means = KeyMeans(rows, places, lambda keys, by: keys * by[0, :, None])
    return RotatedKeys.of(segments, 4, True, [0] * len(segments), means)


ENCODERS = {
    "flat": Flat.of,
    **{f"keys{b}": lambda x, b=b: PackedKeys.of(x, b, GROUP) for b in (2, 4, 8)},
    **{f"values{b}": lambda x, b=b: PackedValues.of(x, b, GROUP) for b in (2, 4, 8)},
    **{f"turned{b}": lambda x, b=b: RotatedKeys.of(x, b, True, [0] * len(x)) for b in (2, 3, 4, 8)},
    **{f"alone{b}": lambda x, b=b: TokenValues.of(x, b, [0] * len(x)) for b in (2, 3, 4)},
    "means": beside_means,
    "pruned": of_pruned,
    "first": lambda x: Pairing().pair(x, partners_of(x))[0],
    "second": lambda x: Pairing().pair(partners_of(x), x)[1],
}
EVERY = pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS)


def decoded(encoded):
    return [encoded.segment(i) for i in range(len(encoded.lengths))]


def assert_same(segments, expected):
    assert len(segments) == len(expected)
    for mine, theirs in zip(segments, expected, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def nbytes(*encoded):
    storages = [t.untyped_storage() for one in encoded for t in one.tensors()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
