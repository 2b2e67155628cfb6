# SPDX-License-Identifier: Apache-2.0
"""Slots that an engine reads, beside what a compressed cache reads of the same entries."""

from __future__ import annotations

import pytest
import torch

from kvfold import KvfoldError
from kvfold.kernels.recalled import RecalledKeys
from kvfold.policies import KeyCodes
from tests.helpers.caches import start
from tests.helpers.models import build, with_key_biases

SPEC = "recall:residual=8,sinks=2,read=0.1"


@pytest.mark.parametrize("lengths", [(64,), (64, 64)])
def test_an_engine_reads_what_the_cache_reads(lengths):
    reader = start(build("llama", torch.float32), SPEC, lengths)
    for state in reader.cache.states:
        store = state.stored()
        keys, _ = store.dense()
        part = store.segments().keys.encoded
        assert isinstance(part, RecalledKeys)
        query = torch.randn(len(lengths), 8, 3, keys.shape[-1])
        got = KeyCodes.of(SPEC, keys).slots(query)
        cold = part.wanted(query.reshape(len(part.lengths), -1, *query.shape[2:]))
        for slots, places in zip(got.flatten(0, 1).tolist(), cold.tolist(), strict=True):
            for own, found in zip(slots, places, strict=True):
                assert own == sorted({0, 1, *found, *range(56, 64)})


def test_newer_keys_follow_and_few_are_all_read():
    generator = torch.Generator().manual_seed(0)
    keys, query = torch.randn(1, 2, 40, 16, generator=generator), torch.randn(1, 4, 1, 16)
    once, later = KeyCodes.of(SPEC, keys), KeyCodes.of(SPEC, keys[:, :, :30])
    assert torch.equal(later.extended(keys[:, :, 30:]).slots(query), once.slots(query))
    few = KeyCodes.of(SPEC, keys[:, :, :9])
    assert few.slots(query)[0, 0, 0].tolist() == list(range(9))
    assert once.nbytes == 2 * 40 * (16 * 2 // 8 + 2)


def test_keys_with_a_bias_are_found_by_what_they_differ_by():
    """As in a cache, whose codes leave the shared mean out; without the RoPE they are refused."""
    model = with_key_biases(build("llama", torch.float64), [1, 3], 40.0)
    reader = start(model, SPEC, (200,))
    for state in reader.cache.states:
        rotate, (keys, _) = state.stored().encode.rotate, state.stored().dense()
        part = state.stored().segments().keys.encoded
        assert (
            rotate is not None and isinstance(part, RecalledKeys) and part.codes.means is not None
        )
        query = torch.randn(1, 8, 3, keys.shape[-1], dtype=torch.float64)
        codes = KeyCodes.of(SPEC, keys, rotate)
        wanted = part.wanted(query.reshape(len(part.lengths), -1, *query.shape[2:]))
        got = codes.slots(query)[0]
        overlap = [
            len({*a} & {*b}) / len(b)
            for one, other in zip(got.tolist(), wanted.tolist(), strict=True)
            for a, b in zip(one, other, strict=True)
        ]
        assert min(overlap) > 0.9  # the cache's mean is of keys that are hot as well
        later = KeyCodes.of(SPEC, keys[:, :, :150], rotate).extended(keys[:, :, 150:])
        assert later.codes.means.positions.lengths == [200] * 2
        with pytest.raises(KvfoldError, match="rotate"):
            KeyCodes.of(SPEC, keys)


@pytest.mark.parametrize(
    "shape",
    [(2, 4, 1, 16), (1, 3, 1, 16), (1, 4, 1, 8), (1, 4, 16), (1, 4, 0, 16)],
    ids=["rows", "heads", "size", "axes", "none"],
)
def test_queries_of_other_shapes_are_refused(shape):
    codes = KeyCodes.of(SPEC, torch.randn(1, 2, 40, 16))
    with pytest.raises(KvfoldError, match="queries are"):
        codes.slots(torch.randn(shape))
    with pytest.raises(KvfoldError, match="keys are"):
        codes.extended(torch.randn(shape))


@pytest.mark.parametrize("shape", [(2, 40, 16), (1, 2, 0, 16)])
def test_keys_of_other_shapes_are_refused(shape):
    with pytest.raises(KvfoldError, match="keys are"):
        KeyCodes.of(SPEC, torch.randn(shape))


@pytest.mark.parametrize("spec", ["snapkv", "snapkv + recall"])
def test_other_methods_are_refused(spec):
    with pytest.raises(KvfoldError, match="recall's"):
        KeyCodes.of(spec, torch.zeros(1, 1, 4, 8))
