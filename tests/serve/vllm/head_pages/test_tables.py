# SPDX-License-Identifier: Apache-2.0
"""Page tables of single heads, against tables made page by page."""

import random

import pytest
import torch

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.head_pages.layout import HeadPages, Layout, Slabs, share
from kvfold.serve.vllm.head_pages.tables import PageTables, by_head

LAYERS, HEADS, BLOCK, BLOCKS = 3, 2, 4, 5000
SLABS = Slabs(LAYERS, BLOCKS, HEADS)


def pages_one_by_one(layout, layer, head, blocks, used):
    """Numbers of the pages that a head reads: its own, then those of vLLM's blocks."""
    own, skipped = [], 0
    if layout is not None:
        there = [
            (of * BLOCKS + block) * HEADS + place
            for block in layout.blocks
            for of in range(LAYERS)
            for place in range(HEADS)
        ]
        before = sum(map(sum, layout.pages_of[:layer])) + sum(layout.pages_of[layer][:head])
        own = there[before : before + layout.pages_of[layer][head]]
        skipped = layout.replaced
    return own + [(layer * BLOCKS + block) * HEADS + head for block in blocks[skipped:used]]


class Asked:
    """A request: its layout as `Layout` has it and as the oracle reads it, and its blocks."""

    def __init__(self, generator, first, *, own):
        self.length = generator.randrange(1, 30)
        self.blocks = list(range(first, first + 9))
        self.layout = self.told = None
        if own:
            self.pages_of = [[generator.randrange(4) for _ in range(HEADS)] for _ in range(LAYERS)]
            pages = HeadPages(tuple(map(tuple, self.pages_of)))
            self.replaced = generator.randrange(1, 4)
            self.length += self.replaced * BLOCK
            self.told = self
            own_blocks = list(range(first + 20, first + 20 + max(1, pages.blocks())))
            self.layout = Layout.of(pages, own_blocks, self.replaced, SLABS)
            self.own_blocks = own_blocks


def check(tables, requests):
    used = [-(-request.length // BLOCK) for request in requests]
    for layer in range(LAYERS):
        for row, request in enumerate(requests):
            for head in range(HEADS):
                told = request.told
                if told is not None:
                    told = type("Told", (), {**vars(told), "blocks": told.own_blocks})
                expected = pages_one_by_one(told, layer, head, request.blocks, used[row])
                at = row * HEADS + head
                assert tables.table[layer, at, : len(expected)].tolist() == expected
                stored = request.length + int(tables.added[layer, at])
                last = request.length - (used[row] - 1) * BLOCK
                assert stored == (len(expected) - 1) * BLOCK + last
        like = tables.alike[layer]
        assert torch.equal(tables.added[like], tables.added[layer]) and like <= layer


@pytest.mark.parametrize("seed", range(20))
def test_tables_are_those_made_page_by_page_while_requests_grow_come_and_go(seed):
    generator = random.Random(seed)
    requests = [Asked(generator, 100 * i, own=generator.random() < 0.6) for i in range(1, 5)]
    tables = PageTables(SLABS, BLOCK)
    for step in range(12):
        if generator.random() < 0.3:
            requests.pop(generator.randrange(len(requests)))
            requests.insert(0, Asked(generator, 1000 + 100 * step, own=generator.random() < 0.5))
        for request in requests:
            request.length = min(9 * BLOCK, request.length + generator.randrange(3))
        blocks = torch.tensor([request.blocks for request in requests], dtype=torch.int32)
        lengths = torch.tensor([request.length for request in requests], dtype=torch.int32)
        tables.update(blocks, lengths, [request.layout for request in requests])
        check(tables, requests)


def test_a_table_is_kept_until_a_request_gets_a_block():
    requests = [Asked(random.Random(i), 100 * i, own=True) for i in (1, 2)]
    for request in requests:
        request.length = request.replaced * BLOCK + 1
    tables, filled = PageTables(SLABS, BLOCK), []
    fill = tables._fill
    tables._fill = lambda rows: filled.append(rows.tolist()) or fill(rows)
    blocks = torch.tensor([request.blocks for request in requests], dtype=torch.int32)
    lengths = torch.tensor([request.length for request in requests], dtype=torch.int32)
    layouts = [request.layout for request in requests]
    tables.update(blocks, lengths, layouts)
    tables.update(blocks, lengths + 3, layouts)
    tables.update(blocks, lengths + torch.tensor([3, 4]), layouts)
    assert filled == [[0, 1], [1]]


@pytest.mark.parametrize("counts", [[1, 1, 1], [3, 1, 2], [5], [1, 4]])
def test_queries_go_head_after_head(counts):
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    of_heads, order = by_head(starts, HEADS)
    names = [(t, h) for t in range(sum(counts)) for h in range(HEADS)]
    place = list(range(len(names))) if order is None else order.tolist()
    assert (order is None) == (max(counts) == 1)
    there = dict(zip(place, names, strict=True))
    expected = [
        (int(starts[row]) + t, h)
        for row, count in enumerate(counts)
        for h in range(HEADS)
        for t in range(count)
    ]
    assert [there[i] for i in range(len(names))] == expected
    ends = torch.tensor([count for count in counts for _ in range(HEADS)]).cumsum(0)
    assert of_heads.tolist() == [0, *ends.tolist()]


def test_blocks_hold_the_pages_of_all_layers_of_the_largest_rank():
    pages = HeadPages(((3, 1, 0, 0), (1, 2, 1, 1)))
    assert pages.blocks() == 2 and pages.blocks(2) == 2 and pages.blocks(4) == 2
    assert HeadPages(((8, 0), (0, 0))).blocks() == 2 and HeadPages(((8, 0),)).blocks(2) == 8
    assert pages.of_rank(0, 2).of_layers == ((3, 1), (1, 2))
    assert pages.of_rank(1, 2).of_layers == ((0, 0), (1, 1))


def test_pages_are_whole():
    assert HeadPages.of([[32, 64], [0, 96]], 32) == HeadPages(((1, 2), (0, 3)))
    assert HeadPages.of([[32, 64], [1, 96]], 32) is None


def test_heads_are_dealt_out_to_ranks():
    assert [share(4, rank, 2) for rank in range(2)] == [slice(0, 2), slice(2, 4)]
    assert [share(2, rank, 4) for rank in range(4)] == [slice(i // 2, i // 2 + 1) for i in range(4)]
    with pytest.raises(KvfoldError, match="3 KV heads cannot be dealt out to 2 ranks"):
        share(3, 0, 2)
