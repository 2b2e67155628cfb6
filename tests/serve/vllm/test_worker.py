# SPDX-License-Identifier: Apache-2.0
"""The worker's side: pages that hold a context, and ranks that hold their heads."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvfold import ContextFileError, KvfoldError
from kvfold.contexts.files.format import opened
from kvfold.serve.vllm.evictions.asked import AskedEviction
from kvfold.serve.vllm.evictions.schedule import EvictionOrder
from kvfold.serve.vllm.export import pages
from kvfold.serve.vllm.head_pages.layout import RUNNING
from kvfold.serve.vllm.scheduler import EngineStep, OwnPages
from tests.helpers.vllm import (
    BLOCK,
    filled,
    layers_of,
    load_of,
    read_pages,
    slots_of,
    worker_side_of,
)


def test_pages_hold_the_context_in_order(served_folder, meta_model):
    load, worker_side = (
        load_of(served_folder.get("even"), [5, 1, 3]),
        worker_side_of(served_folder, meta_model),
    )
    layers = layers_of(2)
    worker_side.fill(layers, load)
    expected = filled(served_folder.path("even"), meta_model)
    for index, layer in layers.items():
        keys, values = layer.read(slots_of(load))
        assert torch.equal(keys[None], expected.layers[index].keys)
        assert torch.equal(values[None], expected.layers[index].values)
        assert int(layer.written.sum()) == 2 * 40


def test_ranks_hold_their_own_heads(served_folder, meta_model):
    load = load_of(served_folder.get("even"), [0, 1, 2])
    expected = filled(served_folder.path("even"), meta_model)
    for rank in range(2):
        layers = layers_of(1)
        worker_side_of(served_folder, meta_model, rank, 2).fill(layers, load)
        for index, layer in layers.items():
            keys, _ = layer.read(slots_of(load))
            assert torch.equal(keys[0], expected.layers[index].keys[0, rank])


def test_a_missing_slice_of_heads_is_refused(served_folder, meta_model):
    load = load_of(served_folder.get("even"), [0, 1, 2])
    # One of two ranks, which thinks that it is alone.
    layers = layers_of(1)
    with pytest.raises(KvfoldError, match=r"holds 1 heads of size 8 .* gives 2"):
        worker_side_of(served_folder, meta_model).fill(layers, load)
    with pytest.raises(KvfoldError, match=r"holds 2 heads of size 16"):
        worker_side_of(served_folder, meta_model).fill(layers_of(2, size=16), load)
    other = layers_of(2)
    del other[0].impl.do_kv_cache_update
    with pytest.raises(KvfoldError, match="fills its pages in the attention itself"):
        worker_side_of(served_folder, meta_model).fill(other, load)
    with pytest.raises(KvfoldError, match="no attention layer 3"):
        worker_side_of(served_folder, meta_model).fill(layers_of(2, 3), load)


def test_a_broken_page_is_remembered(served_folder, meta_model, monkeypatch):
    served, worker_side = served_folder.get("even"), worker_side_of(served_folder, meta_model)
    first, again = layers_of(2), layers_of(2)
    worker_side.fill(first, load_of(served, [0, 1, 2]))
    monkeypatch.setattr(served_folder, "path", lambda name: pytest.fail("the file is read again"))
    load = load_of(served, [0, 1, 6], start=2 * BLOCK)
    worker_side.fill(again, load)
    for index, layer in again.items():
        before = first[index].read(range(2 * BLOCK, 40))
        for part, expected in zip(layer.read(slots_of(load)), before, strict=True):
            assert torch.equal(part, expected)
        assert int(layer.written.sum()) == 2 * (40 - 2 * BLOCK)


def test_a_file_that_was_replaced_meanwhile_is_refused(served_folder, meta_model):
    served = dataclasses.replace(served_folder.get("even"), salt=served_folder.get("other").salt)
    with pytest.raises(ContextFileError, match="was replaced meanwhile"):
        worker_side_of(served_folder, meta_model).fill(layers_of(2), load_of(served, [0, 1, 2]))


# --- pages of single heads -----------------------------------------------------------------------

BLOCKS = [7, 2, 11, 5, 0, 9, 3, 14, 1, 12]


@pytest.fixture
def uneven(served_folder):
    return served_folder.get("uneven")


def numbers_of(of_layers, blocks, in_cache=16):
    """Numbers of each head's pages, layer after layer: page after page through the blocks.

    In a block come those of the first layer's heads, then the next one's.
    """
    layers, heads = len(of_layers), len(of_layers[0])
    every = [
        (layer * in_cache + block) * heads + head
        for block in blocks
        for layer in range(layers)
        for head in range(heads)
    ]
    found = []
    for counts in of_layers:
        found.append([])
        for count in counts:
            found[-1].append(every[:count])
            every = every[count:]
    return found


def exported(served_folder, meta_model, heads=slice(None)):
    """What fills the pages of each layer's heads, and the last tokens."""
    with opened(served_folder.path("uneven")) as file:
        return list(pages(file, meta_model, heads, served_folder.counts(file)))


def assert_holds(layers, found, blocks, kept, start=0):
    """Each head's pages, but those in blocks before position `start`, and the last tokens."""
    filled, rests = 0, 0
    numbers = numbers_of([own.of_heads for own in found[::2]], blocks)
    heads = len(numbers[0])
    skipped = start // BLOCK * len(layers) * heads
    before = 0
    for own, rest in zip(found[::2], found[1::2], strict=True):
        pages = [number for head in numbers[own.layer] for number in head]
        left = max(0, min(len(pages), skipped - before))
        before += len(pages)
        read = read_pages(layers, pages[left:])
        for part, expected in zip(read, (own.keys, own.values), strict=True):
            assert torch.equal(part, expected[left * BLOCK :, 0])
        filled += (len(pages) - left) * BLOCK
        places = range(kept - len(rest.keys), kept)
        slots = [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in places]
        last = layers[own.layer].read(slots)
        for part, expected in zip(last, (rest.keys, rest.values), strict=True):
            assert torch.equal(part.transpose(0, 1), expected)
        rests += rest.keys[:, :, 0].numel()
    assert sum(int(layer.written.sum()) for layer in layers.values()) == filled + rests


@pytest.mark.parametrize("rank, size", [(0, 1), (0, 2), (1, 2)])
def test_each_head_has_pages_of_its_own(served_folder, meta_model, uneven, rank, size):
    held = 2 // size
    heads = slice(rank * held, (rank + 1) * held)
    layers = layers_of(held)
    blocks = BLOCKS[: -(-uneven.kept // BLOCK)]
    worker_side_of(served_folder, meta_model, rank, size).fill(layers, load_of(uneven, blocks))
    found = exported(served_folder, meta_model, heads)
    assert [own.of_heads for own in found[::2]] == [of[heads] for of in uneven.pages.of_layers]
    assert_holds(layers, found, blocks, uneven.kept)
    assert len({own.of_heads for own in found[::2]}) > 1


def test_behind_a_prefix_that_is_cached_only_later_blocks_are_written(
    served_folder, meta_model, uneven
):
    layers = layers_of(2)
    blocks = BLOCKS[: -(-uneven.kept // BLOCK)]
    load = load_of(uneven, blocks, start=2 * BLOCK)
    worker_side_of(served_folder, meta_model).fill(layers, load)
    found = exported(served_folder, meta_model)
    assert sum(sum(own.of_heads) for own in found[::2]) > 2 * 8
    assert_holds(layers, found, blocks, uneven.kept, start=2 * BLOCK)
    assert not any(layer.written[blocks[:2]].any() for layer in layers.values())


def test_the_last_tokens_are_remembered_without_the_pages(
    served_folder, meta_model, uneven, monkeypatch
):
    worker_side = worker_side_of(served_folder, meta_model)
    blocks, whole = BLOCKS[: -(-uneven.kept // BLOCK)], uneven.kept // BLOCK * BLOCK
    worker_side.fill(layers_of(2), load_of(uneven, blocks))
    found = exported(served_folder, meta_model)
    monkeypatch.setattr(served_folder, "path", lambda name: pytest.fail("the file is read again"))
    layers = layers_of(2)
    load = load_of(uneven, [*blocks[:-1], 15], start=whole)
    worker_side.fill(layers, load)
    for rest in found[1::2]:
        keys, values = layers[rest.layer].read(slots_of(load))
        assert torch.equal(keys.transpose(0, 1), rest.keys)
        assert torch.equal(values.transpose(0, 1), rest.values)
        assert int(layers[rest.layer].written.sum()) == 2 * (uneven.kept - whole)


def test_pages_of_another_number_of_heads_are_refused(served_folder, meta_model, uneven):
    load = load_of(uneven, BLOCKS)
    with pytest.raises(KvfoldError, match=r"holds 1 heads of size 8 .* gives 2"):
        worker_side_of(served_folder, meta_model).fill(layers_of(1), load)


def test_the_attention_finds_layouts_by_the_block_that_is_written(
    served_folder, meta_model, uneven
):
    worker_side = worker_side_of(served_folder, meta_model)
    own = OwnPages(uneven.pages, BLOCKS[: uneven.kept // BLOCK], uneven.kept // BLOCK)
    layers = layers_of(2)
    worker_side.lay(EngineStep(laid={"a": own, "b": own}, writing={4: "a", 6: "b"}), layers)
    assert set(RUNNING) == {4, 6}
    layout = RUNNING[4]
    assert layout.replaced == own.replaced and layout is not RUNNING[6]
    numbers = numbers_of(uneven.pages.of_layers, own.blocks)
    for index, of_heads in enumerate(uneven.pages.of_layers):
        assert layout.counts[index].tolist() == list(of_heads)
        expected = [page for head in numbers[index] for page in head]
        assert layout.pages(index).tolist() == expected
    worker_side.lay(EngineStep(gone=["a"], writing={8: "b"}), {})
    assert set(RUNNING) == {8}
    worker_side.lay(EngineStep(gone=["b"], laid={"b": own}, writing={8: "b"}), layers)
    assert set(RUNNING) == {8}
    worker_side.lay(EngineStep(gone=["b"]), {})
    assert RUNNING == {}


def test_a_rank_lays_the_pages_of_its_own_heads(served_folder, meta_model, uneven):
    own = OwnPages(uneven.pages, BLOCKS, 0)
    for rank in range(2):
        worker_side = worker_side_of(served_folder, meta_model, rank, 2)
        worker_side.lay(EngineStep(laid={"a": own}, writing={0: "a"}), layers_of(1))
        assert RUNNING[0].counts[:, 0].tolist() == [of[rank] for of in uneven.pages.of_layers]
        worker_side.lay(EngineStep(gone=["a"]), {})


# --- evictions -----------------------------------------------------------------------------------


class Failing:
    """An evicted row that cannot be made smaller."""

    def __init__(self, *_: object) -> None:
        self.layout = None

    def evict(self, order: object, queries: object) -> bool:
        raise KvfoldError("out of luck")


def test_a_request_that_cannot_be_compressed_fails_until_it_ends(
    served_folder, meta_model, monkeypatch
):
    """vLLM does not look at a block that begins in this step: 64 tokens of 16 were read."""
    monkeypatch.setattr("kvfold.serve.vllm.worker.EvictedRow", Failing)
    worker_side, layers = worker_side_of(served_folder, meta_model), layers_of(2)
    asked = AskedEviction.of({"method": "knorm", "budget": 0.5}, BLOCK)
    order = EvictionOrder(asked, 0, 64, 0, [1, 2, 3, 4], [9, 10], None)
    writing = {5: "a", 7: "b"}
    assert worker_side.lay(EngineStep(evictions={"a": order}, writing=writing), layers) == [5]
    assert worker_side.lay(EngineStep(writing=writing), layers) == [5]
    assert worker_side.lay(EngineStep(gone=["a"], writing=writing), layers) == []
    assert worker_side.done == {}
