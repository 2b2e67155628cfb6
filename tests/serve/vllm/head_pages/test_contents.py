# SPDX-License-Identifier: Apache-2.0
"""Entries read back from blocks, which are laid out number by number here."""

from types import SimpleNamespace

import pytest
import torch

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.head_pages.contents import check_contents, plain, with_keys_transposed

HEADS, BLOCK, SIZE = 3, 4, 5


def offset_of_key(read, at, i):
    """Where number i of a page's key `at` lies in the page."""
    return i * BLOCK + at if read is with_keys_transposed else at * 2 * SIZE + i


def offset_of_value(read, at, i):
    return (BLOCK + at) * SIZE + i if read is with_keys_transposed else at * 2 * SIZE + SIZE + i


def layer_of(writes, read):
    """A layer whose kernels lay entries out as `writes` reads them, beside a reader of pages."""

    def update(layer, keys, values, cache, slots):
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            for head in range(HEADS):
                page, at = cache[slot // BLOCK, head].view(-1), slot % BLOCK
                for i in range(SIZE):
                    page[offset_of_key(writes, at, i)] = key[head, i]
                    page[offset_of_value(writes, at, i)] = value[head, i]

    impl = SimpleNamespace(
        num_kv_heads=HEADS, head_size=SIZE, do_kv_cache_update=update, read_blocks=read
    )
    return SimpleNamespace(
        kv_cache=torch.zeros(9, HEADS, BLOCK, 2 * SIZE), impl=impl, isa="by hand"
    )


READERS = [with_keys_transposed, plain]


@pytest.mark.parametrize("read", READERS, ids=["transposed", "plain"])
def test_blocks_are_read_in_the_order_of_the_request(read):
    layer, blocks = layer_of(read, read), [7, 2, 5]
    given = torch.randn(2, 3 * BLOCK, HEADS, SIZE)
    slots = torch.tensor([block * BLOCK + at for block in blocks for at in range(BLOCK)])
    layer.impl.do_kv_cache_update(layer, *given, layer.kv_cache, slots)
    for found, wrote in zip(read(layer.kv_cache, blocks), given, strict=True):
        assert torch.equal(found, wrote.transpose(0, 1))
    keys, values = read(layer.kv_cache, [])
    assert keys.shape == values.shape == (HEADS, 0, SIZE)


@pytest.mark.parametrize("read", READERS, ids=["transposed", "plain"])
def test_kernels_that_lay_entries_out_otherwise_are_refused(read):
    check_contents(layer := layer_of(read, read), BLOCK)
    assert not layer.kv_cache.any()
    other = next(each for each in READERS if each is not read)
    with pytest.raises(KvfoldError, match=r"\(by hand\) lay entries out in a way"):
        check_contents(layer_of(other, read), BLOCK)
