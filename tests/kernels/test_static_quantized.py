# SPDX-License-Identifier: Apache-2.0
"""Attention to packed entries without a GPU kernel, against the numbers they stand for."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from kvfold.generation.static import ragged as segments
from kvfold.kernels.ragged import attend_to_segments
from kvfold.kernels.reference import attend_with_column_sums
from kvfold.kernels.static_quantized import attend_to_quantized_segments, reads_quantized
from kvfold.store.per_token import Quantizing
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
    assert reads_quantized(stored)
    assert tuple(part.tail.shape[2] - part.gaps[0] for part in (stored.keys, stored.values)) == (
        4,
        48,
    )
    options: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "sink_logits": sink_logits}
    expected, _ = attend_with_column_sums(query, *store.dense(), None, **options)
    got = attend_to_quantized_segments(query, stored, backend="eager", **options)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sink_logits", [None, torch.linspace(-1, 1, 8)])
@pytest.mark.parametrize("bits", [(2, 3), (3, 4), (4, 2), (8, 4)])
@pytest.mark.parametrize("sinks", [0, 3])
def test_attention_to_what_was_quantized_alone_is_the_reference(bits, sinks, softcap, sink_logits):
    query, keys, values = random_entries()
    encode = Quantizing(*bits, sinks=sinks, residual=10)
    store = stored_in(keys, values, encode)
    assert reads_quantized(store.segments())
    options: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "sink_logits": sink_logits}
    expected, _ = attend_with_column_sums(query, *store.dense(), None, **options)
    for attend in (partial(attend_to_quantized_segments, backend="eager"), eager_attention):
        got = attend(query, store.segments(), **options)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def eager_attention(query, stored, **options):
    return attend_to_segments(query, stored, None, **options)


def test_segments_that_lost_sinks_are_read_otherwise():
    _, keys, values = random_entries()
    for gone, same in ((50, True), (0, False)):
        store = stored_in(keys, values, Quantizing(sinks=3, residual=10))
        left = [[i for i in range(100) if i != lost] for lost in (gone, 50, 50, 50)]
        store.keep(torch.tensor(left).unflatten(0, (2, 2)))
        assert reads_quantized(store.segments()) == same


@pytest.mark.parametrize("bits", [(4, 4), (8, 3)])
def test_what_was_quantized_alone_is_compiled_once_for_all_lengths(bits):
    torch._dynamo.reset()
    counters.clear()
    for length in (60, 100, 77):
        query, keys, values = random_entries(length)
        store = stored_in(keys, values, Quantizing(*bits, sinks=2, residual=10))
        options: dict[str, Any] = {"scale": 0.3, "softcap": None, "sink_logits": None}
        got = attend_to_quantized_segments(query, store.segments(), backend="inductor", **options)
        expected, _ = attend_with_column_sums(query, *store.dense(), None, **options)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == 2


def random_entries(length=100):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, heads, count, 32, generator=generator)
        for heads, count in ((8, 1), (2, length), (2, length))
    )


def stored_in(keys, values, encode):
    every = torch.arange(keys.shape[2]).expand(keys.shape[:3])
    store = RaggedStore(keys, values, None, every, encode)
    store.encode_due(decoding=False)
    return store


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
    got = attend_to_quantized_segments(query, store.segments(), backend="eager", **options)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("spec", ENCODED[:2])
def test_what_is_packed_is_read_so(model, monkeypatch, spec):
    def never(*args: object, **options: object) -> None:
        raise AssertionError("entries were unpacked")

    monkeypatch.setattr(segments, "attend_to_segments", never)
    outs, caches = both(model, spec, max_new_tokens=30)
    assert torch.equal(*outs)
    check_same(*caches)
