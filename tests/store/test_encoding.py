# SPDX-License-Identifier: Apache-2.0
"""What all encodings promise: length, dtype, extension, selection, memory of their own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold import KvfoldError, parse
from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.observers.last_queries import window_of
from kvfold.store.encoding import Encode
from kvfold.store.paired import Pairing
from kvfold.store.per_token import Quantizing
from kvfold.store.pruned import Pruning
from kvfold.store.quantized import Packing
from tests.helpers.encoded import EVERY, GROUP, SIZE, assert_same, decoded, entries

BITS = pytest.mark.parametrize("bits", [2, 4, 8])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
RAGGED = [48, 0, 16, 32]


@EVERY
@DTYPES
def test_segments_decode_to_their_length_size_and_dtype(encode, dtype):
    segments = entries(RAGGED, dtype)
    encoded = encode(segments)
    assert encoded.lengths == RAGGED
    for segment, given_entries in zip(decoded(encoded), segments, strict=True):
        assert segment.shape == given_entries.shape
        assert segment.dtype == dtype
        assert segment.isfinite().all()


@BITS
def test_a_segment_does_not_depend_on_its_neighbours(bits):
    segments, partners = entries(RAGGED), entries(RAGGED, seed=1)

    def encoded(mine, theirs):
        packed = [PackedKeys.of(mine, bits, GROUP), PackedValues.of(mine, bits, GROUP)]
        return [*packed, *Pairing().pair(mine, theirs)]

    together = encoded(segments, partners)
    for i in range(len(RAGGED)):
        alone = encoded(segments[i : i + 1], partners[i : i + 1])
        assert_same([one.segment(i) for one in together], [one.segment(0) for one in alone])


@EVERY
def test_extending_appends_what_was_encoded_and_encodes_nothing_again(encode):
    old, new = encode(entries(RAGGED)), encode(entries([16, 32, 0, 64], seed=1))
    before = [t.clone() for t in old.tensors()]
    both = old.extended(new)
    assert both.lengths == [64, 32, 16, 96]
    parts = zip(decoded(old), decoded(new), strict=True)
    assert_same(decoded(both), [torch.cat(pair) for pair in parts])
    assert_same(old.tensors(), before)


@EVERY
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
@settings(max_examples=10, deadline=None)
def test_selecting_copies_segments(encode, order):
    encoded = encode(entries(RAGGED))
    chosen = encoded.select(order)
    assert chosen.lengths == [RAGGED[i] for i in order]
    expected = [encoded.segment(i).clone() for i in order]
    for tensor in encoded.tensors():
        tensor.zero_()
    assert_same(decoded(chosen), expected)


@EVERY
def test_what_is_encoded_owns_its_memory(encode):
    segments = entries([32])
    encoded = encode(segments)
    before = encoded.segment(0).clone()
    segments[0].zero_()
    assert torch.equal(encoded.segment(0), before)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in encoded.tensors())


@EVERY
def test_nothing_at_all_is_encoded_and_extended(encode):
    nothing, some = encode(entries([0, 0])), encode(entries([32, 16]))
    assert nothing.lengths == [0, 0]
    assert [segment.shape for segment in decoded(nothing)] == [(0, SIZE)] * 2
    assert_same(decoded(nothing.extended(some)), decoded(some))
    assert_same(decoded(some.extended(nothing)), decoded(some))


@pytest.mark.parametrize(
    ("spec", "encode", "window"),
    [
        ("kivi", Packing(4, 4, 32, 128), 0),
        ("kivi:bits=2,group=16,residual=32", Packing(2, 2, 16, 32), 0),
        ("kivi:value_bits=8", Packing(4, 8, 32, 128), 0),
        ("kivi:bits=8,key_bits=2", Packing(2, 8, 32, 128), 0),
        ("turboquant", Quantizing(4, 4, True, 4, 32, 0), 0),
        ("turboquant_4bit", Quantizing(4, 4, True, 4, 32, 0), 0),
        ("turboquant_k8v4", Quantizing(8, 4, True, 4, 32, 0), 0),
        ("turboquant_k3v4", Quantizing(3, 4, True, 4, 32, 2), 0),
        ("turboquant_3bit", Quantizing(3, 3, True, 4, 32, 2), 0),
        ("turboquant:values=2,sinks=1", Quantizing(4, 2, True, 1, 32, 2), 0),
        ("turboquant_3bit:end_layers=0,correct=false", Quantizing(3, 3, False, 4, 32, 0), 0),
        ("think", Pruning(0.4, 32, 32), 32),
        ("think:ratio=0.5,recent=0,queries=8", Pruning(0.5, 0, 8), 8),
        ("minicache", Pairing(0.6, 0.05, 0.5, 64), 0),
        ("minicache:t=0.5,gamma=0,start=0.25,block=16", Pairing(0.5, 0.0, 0.25, 16), 0),
    ],
)
def test_a_method_names_how_entries_are_stored(spec, encode, window):
    stages = parse(spec).stages()
    assert stages.encode == encode
    assert isinstance(stages.encode, Encode)
    assert window_of(stages.needs) == window
    assert stages.score is None
    assert not parse(spec).takes_budget


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kivi:bits=3", "bits, not 3"),
        ("kivi:residual=100", "not 100"),
        ("turboquant:keys=5", "or 8 for FP8, not 5"),
        ("turboquant:values=8", "2, 3 or 4 bits, not 8"),
        ("turboquant:sinks=-1", "sinks is 0 or more, not -1"),
        ("turboquant:end_layers=-2", "end_layers is 0 or more, not -2"),
        ("think:ratio=1", "not 1.0"),
        ("minicache:t=2", "not 2.0"),
        ("minicache:block=0", "not 0"),
    ],
)
def test_a_method_refuses_values_that_cannot_be_used(spec, message):
    with pytest.raises(KvfoldError, match=message):
        parse(spec)
