# SPDX-License-Identifier: Apache-2.0
"""Attention to packed entries without a GPU kernel, against the numbers they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from kvfold.generation.static import ragged as segments
from kvfold.kernels.reference import attend_with_column_sums
from kvfold.kernels.static_quantized import attend_to_packed_segments, reads_packed
from kvfold.store.quantized import Packing
from kvfold.store.ragged import RaggedStore
from tests.helpers.compiled import (
    ENCODED,
    both,
    check_same,
    small,
)

# The products are compiled.
pytestmark = pytest.mark.slow


@pytest.fixture
def model():
    torch._dynamo.reset()
    counters.clear()
    return small("llama")


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sink_logits", [None, torch.linspace(-1, 1, 8)])
@pytest.mark.parametrize("bits", [(4, 4), (2, 8)])
def test_attention_to_what_is_packed_is_the_reference_on_what_it_stands_for(
    bits, softcap, sink_logits
):
    """Of keys and of values there are differently many packed."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, heads, length, 32, generator=generator)
        for heads, length in ((8, 1), (2, 100), (2, 100))
    )
    every = torch.arange(100).expand(2, 2, 100)
    encode = Packing(key_bits=bits[0], value_bits=bits[1], group=16, residual=48)
    store = RaggedStore(keys, values, None, every, encode)
    store.encode_due(decoding=False)
    stored = store.segments()
    assert reads_packed(stored)
    assert tuple(part.tail.shape[2] - part.gaps[0] for part in (stored.keys, stored.values)) == (
        4,
        48,
    )
    options: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "sink_logits": sink_logits}
    expected, _ = attend_with_column_sums(query, *store.dense(), None, **options)
    got = attend_to_packed_segments(query, stored, backend="eager", **options)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_packed_entries_of_half_precision_are_summed_up_in_full():
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(1, heads, length, 32, generator=generator).bfloat16()
        for heads, length in ((4, 1), (2, 100), (2, 100))
    )
    every = torch.arange(100).expand(1, 2, 100)
    store = RaggedStore(keys, values, None, every, Packing(group=16, residual=48))
    store.encode_due(decoding=False)
    decoded = [entries.float() for entries in store.dense()]
    expected, _ = attend_with_column_sums(query.float(), *decoded, None, scale=0.3)
    options: dict[str, Any] = {"scale": 0.3, "softcap": None, "sink_logits": None}
    got = attend_to_packed_segments(query, store.segments(), backend="eager", **options)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=2e-2)


def test_what_is_packed_is_read_so(model, monkeypatch):
    def never(*args: object, **options: object) -> None:
        raise AssertionError("entries were unpacked")

    monkeypatch.setattr(segments, "attend_to_segments", never)
    outs, caches = both(model, ENCODED[0], max_new_tokens=30)
    assert torch.equal(*outs)
    check_same(*caches)
