# SPDX-License-Identifier: Apache-2.0
"""`EvictedRow`: its pages hold the entries that the policy keeps, by a cache laid out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.errors import BudgetError, KvfoldError
from kvfold.policies.row_policy import RowPolicy
from kvfold.serve.vllm.evictions.asked import AskedEviction, Shape
from kvfold.serve.vllm.evictions.copying import EvictedRow
from kvfold.serve.vllm.evictions.rank_heads import RankHeads
from kvfold.serve.vllm.evictions.schedule import EvictionOrder
from kvfold.serve.vllm.head_pages.contents import with_keys_transposed
from kvfold.serve.vllm.head_pages.queries import QueryRing, QueryTail
from tests.helpers.rows import SIZE, RandomRow

BLOCK, HEADS, LAYERS, TOKENS = 16, 4, 3, 100
BLOCKS = [9, 2, 14, 5, 7, 1, 11, 3, 16, 18, 20]  # of the request, in vLLM's cache
TARGETS = [4, 12, 6, 8, 22]
ALONE = RankHeads(0, 1, HEADS, lambda own: own)


class Layer:
    """A slab of a cache `[·, H, block, 2·D]` of all layers; keys of a page lie as `[D, block]`."""

    def __init__(self, kv_cache: Tensor) -> None:
        self.kv_cache = kv_cache
        self.impl = SimpleNamespace(
            num_kv_heads=kv_cache.shape[1],
            head_size=SIZE,
            scale=SIZE**-0.5,
            logits_soft_cap=0.0,
            do_kv_cache_update=self.update,
            read_blocks=with_keys_transposed,
        )

    def update(self, layer: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Any) -> None:
        """Writes number by number, at its offset in the page."""
        for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
            for head in range(cache.shape[1]):
                page, at = cache[slot // BLOCK, head].view(-1), slot % BLOCK
                for i in range(SIZE):
                    page[i * BLOCK + at] = key[head, i]
                    page[BLOCK * SIZE + at * SIZE + i] = value[head, i]


def page_of(whole: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[block, D]` of a page, number `(layer · blocks + block) · H + h`."""
    keys, values = whole.view(-1, 2 * BLOCK * SIZE)[number].split(BLOCK * SIZE)
    return keys.view(SIZE, BLOCK).T, values.view(BLOCK, SIZE)


def in_vllm(row: RandomRow, held: slice = slice(None)) -> dict[int, Layer]:
    """Layers that hold all tokens of a row in `BLOCKS`, of the heads `held`."""
    layers, most = {}, row.keys.shape[2]
    heads = len(range(HEADS)[held])
    whole = torch.zeros(LAYERS, 24, heads, BLOCK, 2 * SIZE)
    slots = torch.tensor([BLOCKS[at // BLOCK] * BLOCK + at % BLOCK for at in range(most)])
    for number in range(LAYERS):
        layers[number] = layer = Layer(whole[number])
        keys, values = (of[number, held].transpose(0, 1) for of in (row.keys, row.values))
        layer.update(layer, keys, values, layer.kv_cache, slots)
    return layers


def queries_of(
    row: RandomRow, eviction: AskedEviction, rank: int = 0, size: int = 1
) -> QueryTail | None:
    """Those that a policy reads, of a rank's query heads."""
    count = eviction.queries(row.seen)
    if count == 0:
        return None
    tail = QueryRing(LAYERS).take(count)
    rows = tail.rows(row.seen - count, row.seen)
    for number in range(LAYERS):
        own = row.queries[number].chunk(size)[rank]
        tail.ring.write(number, rows, own[:, row.seen - count : row.seen].transpose(0, 1))
    return tail


def order_of(
    eviction: AskedEviction, tokens: int, first: int = 0, targets: Any = None
) -> EvictionOrder:
    blocks = BLOCKS[first : -(-tokens // BLOCK)]
    return EvictionOrder(eviction, 0, tokens, first, blocks, targets or TARGETS, None)


def assert_holds(row: EvictedRow, layers: dict[int, Layer], of: RandomRow) -> None:
    """Each head's own pages hold the keys and values of `of.tokens` before the last block."""
    assert row.layout is not None and row.layout.replaced == of.seen // BLOCK
    numbers = row.layout.numbers.tolist()
    cache = layers[0].kv_cache
    whole = cache.as_strided((LAYERS, *cache.shape), (cache.numel(), *cache.stride()))
    heads = range(HEADS)[row.ranks.own]
    for number in layers:
        for at, head in enumerate(heads):
            tokens = of.tokens[number][head]
            own = tokens[tokens < of.seen // BLOCK * BLOCK]
            first, count = (
                int(part[number, at]) for part in (row.layout.firsts, row.layout.counts)
            )
            pages = [page_of(whole, page) for page in numbers[first : first + count]]
            assert count * BLOCK == len(own)
            for part, every in enumerate((of.keys, of.values)):
                found = [page[part] for page in pages]
                assert torch.equal(
                    torch.cat([every[number, head, :0], *found]), every[number, head, own]
                )


class Gathering:
    """The gather of `size` ranks, each in a thread of its own."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier = size, Barrier(size, timeout=30)
        self._given: list[Any] = [None] * size

    def of(self, rank: int) -> RankHeads:
        def gather(own: Tensor) -> Tensor:
            self._given[rank] = own
            self._barrier.wait()
            joined = torch.cat(self._given)
            self._barrier.wait()
            return joined

        return RankHeads(rank, self.size, HEADS, gather)

    def run(self, work: Callable[[int], None]) -> None:
        """Runs `work` of every rank; raises what one of them raises."""
        with ThreadPoolExecutor(self.size) as pool:
            list(pool.map(work, range(self.size)))


def rounds_of(random_row: RandomRow, eviction: AskedEviction) -> Iterator[RandomRow]:
    """The row after its prompt and after each of three rounds, by `RowPolicy`."""
    policy = RowPolicy(eviction.policy, eviction.budget)
    random_row.keep(policy.prompt(random_row.prefill(eviction.policy)).indices)
    yield random_row
    for _ in range(3):
        random_row.read(20)
        slots = policy.round(random_row.stored(eviction.policy))
        assert slots is not None
        random_row.keep(slots)
        yield random_row


@pytest.mark.parametrize("method", ["snapkv:window=8 + adakv", "pyramidkv:window=8", "knorm"])
@pytest.mark.parametrize("late, size", [(False, 1), (True, 1), (False, 2), (False, 4), (False, 8)])
def test_pages_hold_what_stays_round_by_round(method, late, size):
    """Late: a second order comes before vLLM knows what the first has replaced.

    Of 8 ranks each two hold the same head.
    """
    eviction = AskedEviction.of({"method": method, "budget": 0.4, "every": 20}, BLOCK)
    shape = Shape(LAYERS, HEADS, 2 * SIZE * 4, BLOCK, size)
    gathering, there = Gathering(size), eviction.blocks(TOKENS, shape)
    targets = [4, 12, 6, 8, 22, 0, 10, 13, 15, 17, 19, 21, 23][:there]

    def work(rank: int) -> None:
        random_row, first = RandomRow.of(LAYERS, HEADS, TOKENS, TOKENS + 60, 0), 0
        ranks = gathering.of(rank)
        layers = in_vllm(random_row, ranks.own)
        row = EvictedRow(eviction, layers, None, BLOCK, ranks)
        for number, kept in enumerate(rounds_of(random_row, eviction)):
            order = order_of(eviction, kept.seen, first, targets)
            assert row.evict(order, queries_of(kept, eviction, rank, size))
            assert_holds(row, layers, kept)
            first = first if late and number == 0 else row.layout.replaced
            counts = row.layout.counts
            assert -(-int(counts.sum()) // counts.numel()) <= row.blocks <= there

    gathering.run(work)


def test_where_everything_stays_nothing_is_copied():
    eviction = AskedEviction.of({"method": "knorm", "budget": 120, "every": 20}, BLOCK)
    random_row = RandomRow.of(LAYERS, HEADS, TOKENS, TOKENS + 40, 0)
    layers = in_vllm(random_row)
    before = [layer.kv_cache.clone() for layer in layers.values()]
    row = EvictedRow(eviction, layers, None, BLOCK, ALONE)
    for tokens in (TOKENS, TOKENS + 20):
        assert not row.evict(order_of(eviction, tokens), None)
    assert row.layout is None
    for old, layer in zip(before, layers.values(), strict=True):
        assert torch.equal(old, layer.kv_cache)
    assert row.evict(order_of(eviction, TOKENS + 40, 0, [*TARGETS, 0, 10, 13]), None)


def test_a_round_whose_part_fills_no_page_leaves_everything():
    eviction = AskedEviction.of({"method": "knorm", "budget": 0.3, "every": 3}, BLOCK)
    random_row = RandomRow.of(LAYERS, HEADS, 20, 20 + 60, 0)
    layers = in_vllm(random_row)
    row = EvictedRow(eviction, layers, None, BLOCK, ALONE)
    for tokens in range(20, 80, 3):
        first = 0 if row.layout is None else row.layout.replaced
        row.evict(order_of(eviction, tokens, first), None)  # raises nothing
    few = AskedEviction.of({"method": "knorm", "budget": 3, "every": 3}, BLOCK)
    row = EvictedRow(few, in_vllm(random_row), None, BLOCK, ALONE)
    with pytest.raises(BudgetError, match="fill 0 pages"):
        row.evict(order_of(few, 20), None)


def test_more_than_the_targets_hold_is_refused_before_it_is_written():
    eviction = AskedEviction.of({"method": "knorm", "budget": 0.5}, BLOCK)
    layers = in_vllm(RandomRow.of(LAYERS, HEADS, TOKENS, TOKENS, 0))
    before = layers[0].kv_cache.clone()
    row = EvictedRow(eviction, layers, None, BLOCK, ALONE)
    with pytest.raises(KvfoldError, match="more is kept than the blocks"):
        row.evict(order_of(eviction, TOKENS, 0, [4, 12]), None)
    assert torch.equal(layers[0].kv_cache, before)
