# SPDX-License-Identifier: Apache-2.0
"""A cache that is filled and read on, and what it holds: positions, bits and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from tests.helpers.budgets import (
    compressed,
)
from tests.helpers.models import continuation, prompts
from tests.helpers.truth import Reader

ALONE, PADDED = (64,), (64, 53, 24)
BATCHES = pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
GREEDY = {"do_sample": False, "max_new_tokens": 8}
OVERSPENDING = ["pyramidkv_official:window=8"]  # it reproduces integers that overspend
STATEFUL = ["h2o", "streaming_llm", "random", "snapkv:window=8", "tova"]


def positions(cache: kvfold.CompressedCache) -> list[list[list[list[int]]]]:
    """Kept positions `[L][B][H]`, as plain lists."""
    layers = range(len(cache.states))
    return [[[h.tolist() for h in row] for row in cache.positions(i)] for i in layers]


def kept(cache: kvfold.CompressedCache) -> list[int]:
    """Every different number of entries that a head of a row of a layer stores."""
    return sorted({n for layer in cache.stats().kept for row in layer for n in row})


def bits(cache: kvfold.CompressedCache) -> list[Tensor]:
    """Copies of all keys and values of the compressible layers."""
    return [x.clone() for layer in cache.compressed_layers for x in (layer.keys, layer.values)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def start(model: Any, spec: str, lengths: tuple[int, ...] = ALONE, **options: Any) -> Reader:
    """A reader that has read a prompt into a small cache."""
    ids, mask = prompts(lengths)
    reader = Reader(model, compressed(model, spec, **options), mask if len(lengths) > 1 else None)
    reader(ids)
    return reader


def go_on(model: Any, text: Tensor, cache: kvfold.CompressedCache, **options: Any) -> Tensor:
    """The next turn. With a mask, lest a generated token 0 is taken for padding."""
    options = {"attention_mask": torch.ones_like(text), **GREEDY, **options}
    return kvfold.generate(model, text, cache=cache, **options)


def decode(reader: Reader, steps: int = 6, seed: int = 2) -> list[Tensor]:
    """Logits of `steps` single tokens."""
    rows = len(reader.cache.positions(0))
    return [reader(token) for token in continuation(rows, steps, seed).split(1, 1)]


def ask(reader: Reader, seed: int) -> Tensor:
    """A question of 12 tokens and a step, taken back afterwards."""
    mask = reader.mask
    with reader.cache.frozen():
        rows = len(reader.cache.positions(0))
        question = continuation(rows, 13, seed)
        logits = torch.cat([reader(question[:, :12]), reader(question[:, 12:])], 1)
        reader.cache.crop(-13)
    reader.mask = mask
    return logits


def counted_bytes(cache: kvfold.CompressedCache) -> int:
    """All that a cache says it holds."""
    stats = cache.stats()
    return stats.nbytes + stats.other_bytes + stats.id_bytes + stats.cold.host


def reachable_bytes(root: Any) -> int:
    """All storages that `root` keeps alive, each once and whole."""
    storages: dict[int, int] = {}
    visited, waiting = set(), [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in visited or isinstance(thing, torch.nn.Module):
            continue
        visited.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, dict):
            waiting += thing.values()
        elif isinstance(thing, list | tuple | set | frozenset):
            waiting += thing
        elif hasattr(thing, "__dict__"):
            waiting += vars(thing).values()
    return sum(storages.values())
