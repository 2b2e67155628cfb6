# SPDX-License-Identifier: Apache-2.0
"""When entries are quantized one by one, which stay whole, and what is refused."""

import pytest
import torch

from kvfold import KvfoldError
from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.store.encoding import EntrySize
from kvfold.store.per_token import Quantizing
from kvfold.store.ragged import RaggedStore
from tests.helpers.encoded import assert_same, entries


def store_of(keys, values, encode):
    """A store of all entries `[B, H, T, D]`, the oldest encoded."""
    every = torch.arange(keys.shape[2]).expand(keys.shape[:3])
    store = RaggedStore(keys, values, None, every, encode)
    store.encode_due(decoding=False)
    return store


def random_entries(heads, length, size=16, seed=0):
    return torch.randn(1, heads, length, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("entries_", "encoded", "prefill", "decoding"),
    [(36, 0, 0, 0), (37, 0, 5, 0), (68, 0, 36, 32), (100, 64, 68, 64), (128, 64, 96, 96),
     (60, 64, 64, 64), (200, 5, 168, 165)],
)  # fmt: skip
def test_entries_wait_until_enough_newer_ones_follow(entries_, encoded, prefill, decoding):
    encode = Quantizing(sinks=4, residual=32)
    assert encode.key_count(entries_, encoded, decoding=False) == prefill
    assert encode.key_count(entries_, encoded, decoding=True) == decoding
    assert encode.value_count(entries_, encoded, decoding=True) == decoding


def test_layers_at_the_ends_stay_raw():
    encode = Quantizing(end_layers=2)
    assert [encode.of_layer(i, 6) is encode for i in range(6)] == [False] * 2 + [True] * 2 + [
        False
    ] * 2
    assert not any(encode.of_layer(i, 3) for i in range(3))


def test_keys_and_values_are_quantized_in_their_bits():
    encode = Quantizing(key_bits=3, value_bits=2, sinks=2)
    segments = entries([8, 1, 0])
    keys, values = encode.keys(segments, None, None), encode.values(segments)
    assert isinstance(keys, RotatedKeys) and keys.bits == 3
    assert isinstance(values, TokenValues) and values.bits == 2
    assert keys.whole.lengths == values.whole.lengths == [2, 1, 0]
    again = encode.keys(segments, None, keys)
    assert isinstance(again, RotatedKeys) and again.whole.lengths == [0, 0, 0]


@pytest.mark.parametrize("room", [500, 3000, 10_000, 123_456])
@pytest.mark.parametrize("encode", [Quantizing(), Quantizing(3, 2, sinks=0, residual=5)])
def test_as_many_entries_fit_as_their_bytes_say(encode, room):
    size = EntrySize(64, 64, 2)
    count = encode.fitting(room, size)

    def needed(entries_):
        raw = min(entries_, encode.sinks + encode.residual)
        codes = 8 * (encode.key_bits + encode.value_bits) + 6 + 4
        return raw * size.whole + (entries_ - raw) * codes

    assert needed(count) <= room < needed(count + 1)


def test_a_head_size_that_fills_no_bytes_is_refused():
    for encode in (Quantizing().keys, Quantizing().values):
        with pytest.raises(KvfoldError, match="heads have 20 channels: choose kivi"):
            encode(entries([4], size=20), None, None) if encode.__name__ == "keys" else encode(
                entries([4], size=20)
            )


def test_encoded_entries_leave_without_being_encoded_again():
    keys, values = random_entries(2, 60), random_entries(2, 60, seed=1)
    store = store_of(keys, values, Quantizing(sinks=2, residual=10))
    decoded = store.dense()
    slots = torch.tensor([[[-1, 1, 7, 30, 55], [0, 1, 2, 3, 49]]])
    store.keep(slots)
    for mine, whole in zip(store.dense(), decoded, strict=True):
        assert_same(
            [mine[0, 0, 1:], mine[0, 1]], [whole[0, 0, slots[0, 0, 1:]], whole[0, 1, slots[0, 1]]]
        )
    assert store.columns.tolist() == slots.tolist() and store.fixed is None
    assert store._keys.encoded.lengths == [3, 5]
    assert store._keys.encoded.whole.lengths == [1, 2]


def test_a_head_of_one_entry_and_one_of_none():
    keys, values = random_entries(2, 60), random_entries(2, 60, seed=1)
    store = store_of(keys, values, Quantizing(sinks=2, residual=10))
    decoded = store.dense()
    store.keep(torch.tensor([[[20], [-1]]]))
    for mine, whole in zip(store.dense(), decoded, strict=True):
        assert torch.equal(mine[0, 0, 0], whole[0, 0, 20])
    store.append(keys[:, :, :40], values[:, :, :40], 60)
    store.encode_due(decoding=True)
    torch.testing.assert_close(store.dense()[0][0, 1, 1:], keys[0, 1, :40], atol=1.5, rtol=0)
