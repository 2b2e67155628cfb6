# SPDX-License-Identifier: Apache-2.0
"""Parts of layers: the most entries that whole pages allow."""

from __future__ import annotations

import dataclasses

import pytest

from kvfold import KvfoldError
from kvfold.contexts.files.format import read_header
from kvfold.serve.vllm.per_layer.scheduler import CacheGroup, PartsSchedulerSide
from kvfold.serve.vllm.per_layer.sizes import Parts, block_size, skipped
from kvfold.serve.vllm.placeholders import CompatibilityCheck, ServedFolder
from tests.helpers.vllm import BLOCK, Layer, header_keeping, request_for, worker_side_of


def test_layers_keep_the_most_that_whole_pages_allow(served_folder):
    header = header_keeping(served_folder, 100, 100, 70, 36)
    parts = Parts.of("1,1,0.5,0.25", BLOCK)
    level = parts.level(header)
    assert level.layers == tuple(
        level.count - skipped(level.count, part, BLOCK) for part in parts.layers
    )
    possible = [
        count
        for count in range(1, 152)
        if all(
            count - skipped(count, part, BLOCK) <= kept
            for part, kept in zip(parts.layers, (100, 100, 70, 36), strict=True)
        )
    ]
    assert level.count == max(possible) and 0 < level.lost < 0.25
    with pytest.raises(KvfoldError, match="would be lost"):
        parts.level(header_keeping(served_folder, 100, 100, 100, 10))
    with pytest.raises(KvfoldError, match="2 parts are named, and there are 4 layers"):
        Parts.of("1,1", BLOCK).level(header)


@pytest.mark.parametrize("text", ["", "1,", "0,1", "1.5", "one", "nan", "-0.5"])
def test_parts_are_above_0_and_up_to_1(text):
    with pytest.raises(KvfoldError, match="name the part of every layer"):
        Parts.of(text, BLOCK)


def test_layers_get_the_last_entries_into_their_own_pages(served_folder, meta_model, tmp_path):
    (tmp_path / "even.kvfold").write_bytes(served_folder.path("even").read_bytes())
    parts = Parts.of("1,1,0.6,0.6", BLOCK)
    own = ServedFolder(tmp_path, lambda header: dataclasses.replace(parts.level(header), lost=0.0))
    served = dataclasses.replace(own.get("even"))
    level = own.counts(read_header(own.path("even")))
    assert (level.count, level.layers) == (40, (40, 40, 24, 24))
    scheduler_side = PartsSchedulerSide(own, CompatibilityCheck(own, meta_model, "float32"), BLOCK)
    scheduler_side.groups = [CacheGroup([0, 1], 1.0), CacheGroup([2, 3], 0.6)]
    request = request_for(served)
    assert scheduler_side.matched(request, 0) == (40, False)
    scheduler_side.allocated(request, [[1, 2, 3], [0, 5, 4]], 40)
    (load,) = scheduler_side.take().loads
    layers = {i: Layer(2) for i in range(4)}
    worker_side_of(own, meta_model).fill(layers, load)
    for index, size in enumerate(level.layers):
        slots = load.by_layer[index]
        assert len(slots) == size and layers[index].kv_cache[0, slots].isfinite().all()
        assert layers[index].kv_cache[0, :, 0, 0].isfinite().sum() == size
    for blocks in ([[1, 2, 3], [6, 5, 4]], [[1, 2, 3], [0, 0, 4]], [[0, 2, 3], [0, 5, 4]]):
        scheduler_side.matched(request, 0)
        with pytest.raises(KvfoldError, match="left other pages"):
            scheduler_side.allocated(request, blocks, 40)


def test_the_page_size_is_that_of_vllms_arguments():
    assert block_size([]) == block_size(["--port", "64"]) == 32
    assert block_size(["--block-size", "64", "--x"]) == block_size(["--block-size=64"]) == 64
    for wrong in (["--block-size", "x"], ["--block-size"], ["--block-size=0"]):
        with pytest.raises(KvfoldError, match="--block-size is a number of entries"):
            block_size(wrong)
