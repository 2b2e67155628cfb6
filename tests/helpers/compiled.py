# SPDX-License-Identifier: Apache-2.0
"""Compiled decoding beside eager decoding: the same tokens, logits and caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

import kvfold
from kvfold import CompressedCache
from kvfold.store.dense import DenseStore
from tests.helpers.budgets import compressed
from tests.helpers.models import build, prompts

ALONE, PADDED = (64,), (64, 53, 24)
DENSE = ["snapkv:window=8", "pyramidkv:window=8", "knorm", "full"]
ENCODED = [
    "snapkv:window=8 + kivi:group=8,residual=8",
    "snapkv:window=8 + turboquant:residual=8,sinks=2",
    "snapkv:window=8 + recall:residual=8,read=0.2",
    "think:queries=8,recent=8",
    "minicache:block=8",
]
HOLDING = ["h2o", "tova", "d2o", "d2o:decide=head_mean", "roco", "streaming_llm_original"]
# One graph without breaks, whose operations run one by one: quick to make.
ONE_GRAPH = {"compile_config": CompileConfig(fullgraph=True, backend="eager", mode=None)}
COMPILED = {"compile": True, **ONE_GRAPH}
GREEDY = {"do_sample": False, "max_new_tokens": 12}
LOGITS = {"return_dict_in_generate": True, "output_logits": True}


def small(name: str, **changes: Any) -> Any:
    return build(name, num_hidden_layers=2, **changes)


def graphs() -> int:
    """Graphs made since the counters were cleared, which must be whole."""
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def both(model: Any, spec: str, lengths: tuple[int, ...] = ALONE, **options: Any) -> Any:
    """Outputs and caches of the same prompts, eager and compiled."""
    ids, mask = prompts(lengths)
    caches = compressed(model, spec), compressed(model, spec)
    if not {"max_length", "generation_config"} & options.keys():
        options = {**GREEDY, **options}
    outs = [
        kvfold.generate(model, ids, cache=cache, attention_mask=mask, **how, **options)
        for cache, how in zip(caches, ({}, COMPILED), strict=True)
    ]
    return outs, caches


def where(cache: CompressedCache) -> list[Any]:
    """Kept positions, as plain lists."""
    layers = range(len(cache.states))
    return [[[h.tolist() for h in row] for row in cache.positions(i)] for i in layers]


def check_same(eager: CompressedCache, compiled: CompressedCache, atol: float = 1e-5) -> None:
    for layer in (*eager.states, *compiled.states):
        if isinstance(layer.store, DenseStore) and layer.store.dead:
            layer.copy_alive()  # one may be further from the next time than the other
    assert compiled.get_seq_length() == eager.get_seq_length()
    assert where(compiled) == where(eager)
    mine, theirs = compiled.stats(), eager.stats()
    for size in ("kv_bytes", "position_bytes", "state_bytes", "nbytes_full", "seen_per_row"):
        assert getattr(mine, size) == getattr(theirs, size)
    for one, other in zip(eager.states, compiled.states, strict=True):
        entries = other.columns()[..., None] >= 0
        for a, b in zip(one.stored().dense(), other.stored().dense(), strict=True):
            torch.testing.assert_close(a * entries, b * entries, atol=atol, rtol=1e-5)
        mine, theirs = (each.observers.numbers() for each in (one, other))
        assert mine.keys() == theirs.keys()
        for name, (numbers, _) in mine.items():
            same = {"atol": 1e-5, "rtol": 1e-5, "equal_nan": True}
            torch.testing.assert_close(theirs[name][0], numbers, **same)
        for name in ("merging", "capacity"):
            of_one, of_other = getattr(one, name), getattr(other, name)
            # NaN: of this head nothing has left.
            torch.testing.assert_close(of_other, of_one, atol=1e-5, rtol=1e-5, equal_nan=True)
        for name in ("surplus", "evictions", "evicted_at", "settled"):
            assert getattr(other, name) == getattr(one, name)


class Streamer:
    """Keeps what it is told; fails when it was told `limit` tokens."""

    def __init__(self, limit: int = 99) -> None:
        self.told: list[int] = []
        self.limit = limit

    def put(self, tokens: torch.Tensor) -> None:
        self.told += tokens.flatten().tolist()
        if len(self.told) == 64 + self.limit:
            raise RuntimeError("the line is dead")

    def end(self) -> None:
        self.told.append(-1)


def refused(model: Any, spec: str, error: Any, reason: str, **options: Any) -> None:
    cache = compressed(model, spec, 40)
    with pytest.raises(error, match=reason):
        kvfold.generate(model, prompts(ALONE)[0], cache=cache, **COMPILED, **GREEDY, **options)
    assert cache.get_seq_length() == 0
