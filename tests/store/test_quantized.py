# SPDX-License-Identifier: Apache-2.0
"""When keys and values are packed, and what a packing refuses."""

import pytest
import torch

from kvfold import KvfoldError
from kvfold.kernels.packing import PackedKeys, PackedValues
from kvfold.store.quantized import Packing
from kvfold.store.ragged import RaggedStore
from tests.helpers.encoded import GROUP, entries


@pytest.mark.parametrize("decoding", [False, True])
def test_keys_are_packed_in_blocks_and_values_one_by_one(decoding):
    packing = Packing(residual=128)
    for entries_, keys, values in ((0, 0, 0), (127, 0, 0), (128, 128, 0), (300, 256, 172)):
        assert packing.key_count(entries_, 0, decoding) == keys
        assert packing.value_count(entries_, 0, decoding) == values
    assert packing.key_count(200, 256, decoding) == 256
    assert packing.value_count(200, 100, decoding) == 100


def test_a_packing_packs_keys_and_values_in_their_bits():
    packing = Packing(key_bits=2, value_bits=8, group=GROUP, residual=32)
    segments = entries([32])
    keys, values = packing.keys(segments, None, None), packing.values(segments)
    assert isinstance(keys, PackedKeys) and keys.bits == 2
    assert isinstance(values, PackedValues) and values.bits == 8
    assert not packing.raw


def test_entries_may_leave_until_their_key_or_value_is_packed():
    keys = torch.stack(entries([70, 70]))[None]
    columns = torch.arange(70).expand(1, 2, -1)
    slots = columns.clone()
    slots[0, 0, :50] = -1  # the first head has 20 entries, the second 70
    store = RaggedStore(keys, keys, columns.int(), slots, Packing(group=GROUP, residual=32))
    assert store.fixed.tolist() == [[[False] * 70] * 2]
    store.encode_due(decoding=False)  # of the second head 64 keys and 38 values
    assert store.fixed.tolist() == [[[False] * 70, [True] * 64 + [False] * 6]]


def test_groups_must_fill_the_head_size():
    with pytest.raises(KvfoldError, match=r"groups of 32 .* head size 48"):
        Packing().values(entries([4], size=48))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_bits": 3}, "2, 4 or 8 bits, not 3"),
        ({"value_bits": 0}, "2, 4 or 8 bits, not 0"),
        ({"group": 12}, "multiple of 8"),
        ({"group": 8, "value_bits": 2}, "multiple of 16"),
        ({"group": 0}, "multiple of 8"),
        ({"residual": 48}, "multiple of 32"),
        ({"residual": 0}, "multiple of 32"),
    ],
)
def test_a_packing_refuses_what_cannot_be_packed(options, message):
    with pytest.raises(KvfoldError, match=message):
        Packing(**options)
