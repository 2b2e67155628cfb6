# SPDX-License-Identifier: Apache-2.0
"""The worker's side: pages that hold a context, and ranks that hold their heads."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvfold import ContextFileError, KvfoldError
from kvfold.serve.vllm.worker import share
from tests.helpers.vllm import BLOCK, Layer, filled, load_of, worker_side_of


def test_pages_hold_the_context_in_order(served_folder, meta_model):
    load, worker_side = (
        load_of(served_folder.get("even"), [5, 1, 3]),
        worker_side_of(served_folder, meta_model),
    )
    layers = {i: Layer(2) for i in range(4)}
    worker_side.fill(layers, load)
    expected = filled(served_folder.path("even"), meta_model)
    for index, layer in layers.items():
        rows = layer.kv_cache[:, load.slots]
        assert torch.equal(rows[0].transpose(0, 1)[None], expected.layers[index].keys)
        assert torch.equal(rows[1].transpose(0, 1)[None], expected.layers[index].values)
        untouched = torch.ones(8 * BLOCK, dtype=torch.bool)
        untouched[load.slots] = False
        assert layer.kv_cache[:, untouched].isnan().all()


def test_ranks_hold_their_own_heads(served_folder, meta_model):
    load = load_of(served_folder.get("even"), [0, 1, 2])
    expected = filled(served_folder.path("even"), meta_model)
    for rank in range(2):
        layers = {i: Layer(1) for i in range(4)}
        worker_side_of(served_folder, meta_model, rank, 2).fill(layers, load)
        for index, layer in layers.items():
            keys = layer.kv_cache[0, load.slots, 0]
            assert torch.equal(keys, expected.layers[index].keys[0, rank])


def test_heads_are_dealt_out_as_vllm_does():
    assert [share(8, rank, 4) for rank in range(4)] == [slice(i, i + 2) for i in (0, 2, 4, 6)]
    assert [share(2, rank, 4) for rank in range(4)] == [slice(i, i + 1) for i in (0, 0, 1, 1)]
    with pytest.raises(KvfoldError, match="cannot be dealt out"):
        share(6, 0, 4)


def test_a_missing_slice_of_heads_is_refused(served_folder, meta_model):
    load = load_of(served_folder.get("even"), [0, 1, 2])
    # One of two ranks, which thinks that it is alone.
    layers = {i: Layer(1) for i in range(4)}
    with pytest.raises(KvfoldError, match=r"holds 1 heads of size 8 .* gives 2"):
        worker_side_of(served_folder, meta_model).fill(layers, load)
    with pytest.raises(KvfoldError, match=r"holds 2 heads of size 16"):
        worker_side_of(served_folder, meta_model).fill({i: Layer(2, 16) for i in range(4)}, load)
    other = {i: Layer(2) for i in range(4)}
    del other[0].impl.do_kv_cache_update
    with pytest.raises(KvfoldError, match="fills its pages in the attention itself"):
        worker_side_of(served_folder, meta_model).fill(other, load)
    with pytest.raises(KvfoldError, match="no attention layer 3"):
        worker_side_of(served_folder, meta_model).fill({i: Layer(2) for i in range(3)}, load)


def test_a_broken_page_is_remembered(served_folder, meta_model, monkeypatch):
    served, worker_side = served_folder.get("even"), worker_side_of(served_folder, meta_model)
    first, again = ({i: Layer(2) for i in range(4)} for _ in range(2))
    worker_side.fill(first, load_of(served, [0, 1, 2]))
    monkeypatch.setattr(served_folder, "path", lambda name: pytest.fail("the file is read again"))
    load = load_of(served, [0, 1, 6], start=2 * BLOCK)
    worker_side.fill(again, load)
    for index, layer in again.items():
        expected = first[index].kv_cache[:, 2 * BLOCK : 40]
        assert torch.equal(layer.kv_cache[:, load.slots], expected)


def test_a_file_that_was_replaced_meanwhile_is_refused(served_folder, meta_model):
    served = dataclasses.replace(served_folder.get("even"), salt=served_folder.get("other").salt)
    with pytest.raises(ContextFileError, match="was replaced meanwhile"):
        worker_side_of(served_folder, meta_model).fill(
            {i: Layer(2) for i in range(4)}, load_of(served, [0, 1, 2])
        )
