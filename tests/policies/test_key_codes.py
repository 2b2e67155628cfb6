# SPDX-License-Identifier: Apache-2.0
"""Slots that an engine reads, beside what a compressed cache reads of the same entries."""

from __future__ import annotations

import pytest
import torch

from kvfold import KvfoldError
from kvfold.kernels.recalled import RecalledKeys
from kvfold.policies import KeyCodes
from tests.helpers.caches import start
from tests.helpers.models import build

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


@pytest.mark.parametrize("spec", ["snapkv", "snapkv + recall"])
def test_other_methods_are_refused(spec):
    with pytest.raises(KvfoldError, match="recall's"):
        KeyCodes.of(spec, torch.zeros(1, 1, 4, 8))
