# SPDX-License-Identifier: Apache-2.0
"""sizes: parts of layers and heads from a file, by another method's scores."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold import CompressedCache, IllegalComposition, KvfoldError
from tests.helpers.by_hand import (
    LAYERS,
    SHAPES,
    WINDOW,
    Head,
    Layer,
    assert_prefill,
    best,
    newest,
    votes,
)
from tests.helpers.caches import ALONE, PADDED, decode, kept, positions, start
from tests.helpers.models import build, continuation, prompts
from tests.helpers.truth import Reader

OF_LAYERS = [0.2, 0.5, 0.3, 0.4]
SNAPKV = f"snapkv:window={WINDOW}"


def written(folder: Path, parts: Any) -> str:
    path = folder / "parts.json"
    path.write_text(json.dumps(parts))
    return f"sizes:file={path}"


def of_heads(heads: int) -> list[list[float]]:
    """Parts from 0.4 to 0.6, the same of no two heads that follow one another."""
    places = [[3 * layer + 2 * head for head in range(heads)] for layer in range(LAYERS)]
    return [[0.4 + 0.05 * (place % 5) for place in layer] for layer in places]


def rounded(shares: list[float], total: int) -> list[int]:
    counts = [math.floor(share + 1e-9) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


@SHAPES
def test_heads_keep_their_parts_of_one_total(tmp_path, heads, lengths) -> None:
    parts = of_heads(heads)
    flat = [part for layer in parts for part in layer]

    def keep(layers: list[Layer]) -> list[list[list[int]]]:
        tokens = len(layers[0].heads[0])
        total = math.floor(0.6 * tokens * len(flat) + 1e-9)
        counts = iter(rounded([total * part / sum(flat) for part in flat], total))
        return [[chosen(head, next(counts)) for head in layer.heads] for layer in layers]

    def chosen(head: Head, count: int) -> list[int]:
        return best(votes(head), count - WINDOW) + newest(head, WINDOW)

    spec = f"{SNAPKV} + {written(tmp_path, parts)}"
    assert_prefill(spec, 0.6, heads, lengths, keep)


def test_with_their_mean_as_budget_parts_are_kept_as_written(model, tmp_path) -> None:
    spec = f"knorm:skip_layers=none + {written(tmp_path, OF_LAYERS)}"
    cache = start(model, spec, budget=0.35).cache
    assert [layer[0] for layer in cache.stats().kept] == [
        [count, count] for count in rounded([64 * part for part in OF_LAYERS], 89)
    ]


@pytest.mark.parametrize("budget", [20, 21, 0.4, 0.77])
def test_the_budget_is_met_exactly_with_padding_and_a_window(model, tmp_path, budget) -> None:
    parts = [[0.9, 0.05], [0.3, 0.0], [0.4, 0.6], [0.1, 1.0]]
    cache = start(model, f"{SNAPKV} + {written(tmp_path, parts)}", PADDED, budget=budget).cache
    for row, length in enumerate(PADDED):
        spent = sum(sum(layer[row]) for layer in cache.stats().kept)
        each = budget * length if isinstance(budget, float) else min(budget, length)
        assert spent == math.floor(8 * each + 1e-9)
        assert min(n for layer in cache.stats().kept for n in layer[row]) >= 8


@pytest.mark.slow
def test_alone_the_last_queries_vote(model, tmp_path) -> None:
    sizes = written(tmp_path, OF_LAYERS)
    whole = start(model, f"{SNAPKV} + {sizes}")
    assert positions(start(model, f"{sizes},window=8").cache) == positions(whole.cache)


def test_parts_of_layers_go_with_adakv_and_every(model, tmp_path) -> None:
    sizes = written(tmp_path, OF_LAYERS)
    cache = start(model, f"{SNAPKV} + {sizes} + adakv", budget=20).cache
    totals = [sum(layer[0]) for layer in cache.stats().kept]
    assert sum(totals) == 160 and sorted(totals) == [totals[i] for i in (0, 2, 3, 1)]
    reader = Reader(model, CompressedCache(model, f"{SNAPKV} + {sizes} + every:interval=4", 20))
    reader(prompts(ALONE)[0])
    before = kept(reader.cache)
    for token in continuation(1, 8).split(1, 1):
        reader(token)
    assert kept(reader.cache) == before


@pytest.mark.parametrize("lengths", [ALONE, PADDED, (9,)], ids=["alone", "padded", "short"])
def test_parts_of_layers_go_with_adakv_in_rounds(model, tmp_path, lengths) -> None:
    """A layer's part is shared by its heads when entries first leave, and held from then on."""
    parts = f"{SNAPKV} + {written(tmp_path, OF_LAYERS)}"
    reader, evenly = (
        start(model, f"{spec} + every:interval=4", lengths, budget=20)
        for spec in (f"{parts} + adakv", parts)
    )
    for one in (reader, evenly):
        decode(one, 28)
    sizes = reader.cache.stats().kept
    for of_heads, alike in zip(sizes, evenly.cache.stats().kept, strict=True):
        assert [sum(row) for row in of_heads] == [sum(row) for row in alike]
    assert any(len(set(row)) > 1 for of_heads in sizes for row in of_heads)
    decode(reader, 4)
    assert reader.cache.stats().kept == sizes


def test_parts_of_heads_do_not_go_with_adakv(model, tmp_path) -> None:
    with pytest.raises(IllegalComposition):
        CompressedCache(model, f"{SNAPKV} + {written(tmp_path, of_heads(2))} + adakv", 20)


@pytest.mark.parametrize("length", [64, 9])
@pytest.mark.parametrize("parts", [OF_LAYERS, of_heads(2)], ids=["layers", "heads"])
def test_rounds_hold_the_budget_that_the_answer_fills(model, tmp_path, parts, length) -> None:
    spec = f"{SNAPKV} + {written(tmp_path, parts)} + every:interval=4"
    reader = start(model, spec, (length,), budget=20)
    decode(reader, 20)
    sizes = [layer[0] for layer in reader.cache.stats().kept]
    assert sum(map(sum, sizes)) == 8 * 20
    decode(reader, 8)
    assert [layer[0] for layer in reader.cache.stats().kept] == sizes


def test_a_second_turn_meets_the_budget_too(model, tmp_path) -> None:
    reader = start(model, f"{SNAPKV} + {written(tmp_path, of_heads(2))}", budget=0.5)
    reader(continuation(1, 20))
    assert sum(sum(layer[0]) for layer in reader.cache.stats().kept) == 8 * 42


def test_parts_of_another_model_are_refused_before_anything_is_read(tmp_path) -> None:
    spec = f"snapkv + {written(tmp_path, [0.5, 0.5])}"
    with pytest.raises(KvfoldError, match="2 layers, and this model compresses 4"):
        CompressedCache(build("llama"), spec, 0.5)
    with pytest.raises(KvfoldError, match=r"3 KV heads, and a layer of this model has 2"):
        CompressedCache(build("llama"), f"snapkv + {written(tmp_path, [[0.5] * 3] * 4)}", 0.5)
    with pytest.raises(KvfoldError, match="needs a file"):
        CompressedCache(build("llama"), "snapkv + sizes", 0.5)
    with pytest.raises(IllegalComposition, match="both bring the allocate"):
        kvfold.parse(f"pyramidkv + {written(tmp_path, [0.5] * 4)}")
