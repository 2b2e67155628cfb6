# SPDX-License-Identifier: Apache-2.0
"""`EvictedRow`: its pages hold the entries that the policy keeps, by a cache laid out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.errors import KvfoldError
from kvfold.policies.row_policy import RowPolicy
from kvfold.serve.vllm.evictions.asked import AskedEviction, Shape
from kvfold.serve.vllm.evictions.copying import EvictedRow, check_layout, read_blocks
from kvfold.serve.vllm.evictions.schedule import EvictionOrder
from kvfold.serve.vllm.head_pages.queries import WATCHED, QueryTail, watched_rows
from tests.helpers.rows import SIZE, RandomRow

BLOCK, HEADS, LAYERS, TOKENS = 16, 4, 3, 100
BLOCKS = [9, 2, 14, 5, 7, 1, 11, 3, 16, 18, 20]  # of the request, in vLLM's cache
TARGETS = [4, 12, 6, 8, 22]


class Layer:
    """An attention layer whose cache `[·, H, block, 2·D]` keeps keys of a page as `[D, block]`."""

    def __init__(self, transposed: bool = True) -> None:
        self.transposed, self.isa = transposed, "by hand"
        self.kv_cache = torch.zeros(24, HEADS, BLOCK, 2 * SIZE)
        self.impl = SimpleNamespace(
            num_kv_heads=HEADS,
            head_size=SIZE,
            scale=SIZE**-0.5,
            logits_soft_cap=0.0,
            do_kv_cache_update=self.update,
        )

    def update(self, layer: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Any) -> None:
        """Writes number by number, at its offset in the page."""
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            for head in range(cache.shape[1]):
                page, at = cache[slot // BLOCK, head].view(-1), slot % BLOCK
                for i in range(SIZE):
                    page[i * BLOCK + at if self.transposed else at * SIZE + i] = key[head, i]
                    page[BLOCK * SIZE + at * SIZE + i] = value[head, i]

    def page(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[block, D]` of a page of one head, number `block·H + h`."""
        flat = self.kv_cache[number // HEADS, number % HEADS].reshape(-1)
        keys, values = flat.split(BLOCK * SIZE)
        return keys.view(SIZE, BLOCK).T, values.view(BLOCK, SIZE)


def in_vllm(row: RandomRow) -> dict[int, Layer]:
    """Layers that hold all tokens of a row in `BLOCKS`."""
    layers, most = {}, row.keys.shape[2]
    slots = torch.tensor([BLOCKS[at // BLOCK] * BLOCK + at % BLOCK for at in range(most)])
    for number in range(LAYERS):
        layers[number] = layer = Layer()
        keys, values = (of[number].transpose(0, 1) for of in (row.keys, row.values))
        layer.update(layer, keys, values, layer.kv_cache, slots)
    return layers


def queries_of(row: RandomRow, eviction: AskedEviction) -> QueryTail:
    """Those that a policy reads, after they came one forward after another."""
    queries = QueryTail(LAYERS, eviction.queries(row.seen))
    for number in range(LAYERS):
        for piece in row.queries[number, :, : row.seen].transpose(0, 1).split(33):
            queries.read(number, piece)
    return queries


def order_of(
    eviction: AskedEviction, tokens: int, first: int = 0, targets: Any = None
) -> EvictionOrder:
    blocks = BLOCKS[first : -(-tokens // BLOCK)]
    return EvictionOrder(eviction, 0, tokens, first, blocks, targets or TARGETS, None)


def assert_holds(row: EvictedRow, layers: dict[int, Layer], of: RandomRow) -> None:
    """Each head's own pages hold the keys and values of `of.tokens` before the last block."""
    assert row.layout is not None and row.layout.replaced == of.seen // BLOCK
    numbers = row.layout.numbers.tolist()
    for number, layer in layers.items():
        for head, tokens in enumerate(of.tokens[number]):
            own = tokens[tokens < of.seen // BLOCK * BLOCK]
            first, count = (
                int(part[number, head]) for part in (row.layout.firsts, row.layout.counts)
            )
            pages = [layer.page(page) for page in numbers[first : first + count]]
            assert count * BLOCK == len(own)
            for part, whole in enumerate((of.keys, of.values)):
                found = [page[part] for page in pages]
                assert torch.equal(
                    torch.cat([whole[number, head, :0], *found]), whole[number, head, own]
                )


@pytest.mark.parametrize("method", ["snapkv:window=8 + adakv", "pyramidkv:window=8", "knorm"])
@pytest.mark.parametrize("late", [False, True])
def test_pages_hold_what_stays_round_by_round(method, late):
    """Late: a second order comes before vLLM knows what the first has replaced."""
    eviction = AskedEviction.of({"method": method, "budget": 0.4, "every": 20}, BLOCK)
    random_row = RandomRow.of(LAYERS, HEADS, TOKENS, TOKENS + 60, 0)
    layers = in_vllm(random_row)
    row = EvictedRow(eviction, layers, None, BLOCK)
    policy, first = RowPolicy(eviction.policy, eviction.budget), 0
    random_row.keep(policy.prompt(random_row.prefill(eviction.policy)).indices)
    for number in range(4):
        if number:
            random_row.read(20)
            slots = policy.round(random_row.stored(eviction.policy))
            assert slots is not None
            random_row.keep(slots)
        order = order_of(eviction, random_row.seen, first)
        assert row.evict(order, queries_of(random_row, eviction))
        assert_holds(row, layers, random_row)
        first = first if late and number == 0 else row.layout.replaced
    shape = Shape(LAYERS, HEADS, 2 * SIZE * 4, BLOCK)
    assert row.layout.blocks <= eviction.blocks(TOKENS, shape) <= len(TARGETS)


def test_where_everything_stays_nothing_is_copied():
    eviction = AskedEviction.of({"method": "knorm", "budget": 120, "every": 20}, BLOCK)
    random_row = RandomRow.of(LAYERS, HEADS, TOKENS, TOKENS + 40, 0)
    layers = in_vllm(random_row)
    before = [layer.kv_cache.clone() for layer in layers.values()]
    row = EvictedRow(eviction, layers, None, BLOCK)
    for tokens in (TOKENS, TOKENS + 20):
        assert not row.evict(order_of(eviction, tokens), None)
    assert row.layout is None
    for old, layer in zip(before, layers.values(), strict=True):
        assert torch.equal(old, layer.kv_cache)
    assert row.evict(order_of(eviction, TOKENS + 40, 0, [*TARGETS, 0, 10, 13]), None)


def test_more_than_the_targets_hold_is_refused_before_it_is_written():
    eviction = AskedEviction.of({"method": "knorm", "budget": 0.5}, BLOCK)
    layers = in_vllm(RandomRow.of(LAYERS, HEADS, TOKENS, TOKENS, 0))
    before = layers[0].kv_cache.clone()
    row = EvictedRow(eviction, layers, None, BLOCK)
    with pytest.raises(KvfoldError, match="more is kept than the blocks"):
        row.evict(order_of(eviction, TOKENS, 0, [4, 12]), None)
    assert torch.equal(layers[0].kv_cache, before)


def test_blocks_are_read_in_the_order_of_the_request():
    random_row = RandomRow.of(LAYERS, HEADS, TOKENS, 7 * BLOCK, 1)
    keys, values = read_blocks(in_vllm(random_row)[2].kv_cache, BLOCKS[:7])
    assert torch.equal(keys, random_row.keys[2])
    assert torch.equal(values, random_row.values[2])


def test_no_blocks_are_read_as_no_entries():
    keys, values = read_blocks(Layer().kv_cache, [])
    assert keys.shape == values.shape == (HEADS, 0, SIZE)


def test_kernels_that_lay_keys_out_otherwise_are_refused():
    check_layout(layer := Layer(), BLOCK)
    assert not layer.kv_cache.any()
    with pytest.raises(KvfoldError, match=r"\(by hand\) lay keys out in a way"):
        check_layout(Layer(transposed=False), BLOCK)


@pytest.mark.parametrize("pieces", [(30,), (3, 2, 1), (1,) * 12, (7, 5, 1, 1), (2, 30, 4)])
@pytest.mark.parametrize("count", [1, 5, 8])
def test_the_last_queries_are_kept(pieces, count):
    given = torch.randn(2, sum(pieces), 4, SIZE)
    queries = QueryTail(2, count)
    for layer in range(2):
        for piece in given[layer].split(list(pieces)):
            buffer = torch.cat([piece, torch.zeros(2, 4, SIZE)])  # vLLM's, written anew
            queries.read(layer, buffer[: len(piece)])
            buffer.zero_()
    for found, whole in zip(queries.stacked(), given, strict=True):
        assert torch.equal(found, whole[-count:].transpose(0, 1))


def test_readers_are_found_by_the_block_that_is_written(monkeypatch):
    reader = QueryTail(1, 4)
    monkeypatch.setitem(WATCHED, 7, reader)
    assert watched_rows([3, 7, 5], [0, 10, 12, 13]) == [(reader, slice(10, 12))]
