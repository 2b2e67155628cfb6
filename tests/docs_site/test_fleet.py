# SPDX-License-Identifier: Apache-2.0
"""docs/fleet.md: its records, and the simulation beside what can be computed by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvfold
from kvfold.bench.cost import measured
from tests.helpers.scripts import BENCHMARKS, scripts_of
from tests.helpers.tokenizers import WORDS, word_tokenizer


@pytest.fixture(scope="module")
def pages() -> Iterator[ModuleType]:
    """`benchmarks/fleet_page.py`."""
    pytest.importorskip("simpy")
    with scripts_of(BENCHMARKS) as script:
        yield script("fleet_page")


@pytest.fixture(scope="module")
def fleet(pages: ModuleType) -> Any:
    return sys.modules["fleet"]


def tiny(fleet: Any) -> Any:
    return fleet.Shape(
        name="tiny", hidden=64, layers=2, heads=4, kv_heads=2, mlp=128, vocabulary=100
    )


def test_the_published_table_and_picture_are_those_of_the_records(pages, tmp_path):
    text = pages.PAGE.read_text(encoding="utf-8")
    runs, sized = pages.load()
    assert pages.page(text, runs, sized) == text
    pages.draw(runs, tmp_path / pages.PICTURE)
    published = (pages.OUT / pages.PICTURE).read_bytes()
    assert (tmp_path / pages.PICTURE).read_bytes() == published


def test_a_published_run_is_simulated_again_as_it_was(pages, fleet):
    runs, sized = pages.load()
    found = next(run for run in runs if run.deployment.stored and run.rate == 8)
    assert fleet.simulate(found.shape, found.deployment, found.assumed, found.rate) == found
    small = next(one for one in sized if one.deployment.method and one.servers == 3)
    assert fleet.sized(*small.key) == small


def test_a_sized_fleet_suffices_and_one_less_does_not(pages, fleet):
    one = next(each for each in pages.load()[1] if each.servers == 2)
    slowest = [
        fleet.simulate(
            one.shape, one.deployment, one.assumed.model_copy(update={"servers": n}), one.rate
        ).slowest
        for n in (1, 2)
    ]
    assert (slowest[0] is None or slowest[0] > one.within) and slowest[1] <= one.within
    assert one.gpu_seconds == 2 * one.shape.gpus / one.rate


def test_every_part_kept_is_simulated_for_every_shape_and_memory(pages, fleet):
    runs, sized = pages.load()
    assert {(run.shape.name, run.deployment.kept) for run in runs} == {
        (shape.name, kept) for shape in fleet.SHAPES for kept in (0, 1, 0.5, 0.3, 0.2, 0.1)
    }
    assert {one.assumed.memory for one in sized} == {0.9 * memory for memory in fleet.MEMORIES}
    assert len({one.key for one in sized}) == 2 * 3 * 9


def test_operations_of_kvzip_are_those_that_a_small_model_counts(fleet):
    """Counted with masked products, which the simulation leaves out: few, as parts are short."""
    tokenizer, document = word_tokenizer(), " ".join(WORDS[number % 9] for number in range(500))
    shape = tiny(fleet).model_copy(update={"vocabulary": len(tokenizer)})
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp,
        vocab_size=shape.vocabulary,
    )
    model = LlamaForCausalLM(config).eval()
    counted = []
    for method, budget in (("full", None), ("kvzip:chunk=100", 0.3)):
        with measured(torch.device("cpu")) as cost:
            context = kvfold.compress(model, tokenizer, document, method, budget)
        counted.append(cost.operations)
    part, tokens = fleet.PART, context.ids.shape[1]
    fleet.PART = 100
    try:
        scoring = shape.scoring("kvzip", tokens)
    finally:
        fleet.PART = part
    assert counted[1] - counted[0] == pytest.approx(scoring, rel=0.1)


def test_bytes_and_operations_are_those_of_the_shape(fleet):
    llama = next(shape for shape in fleet.SHAPES if shape.name == "Llama-3.1-8B")
    assert llama.bytes_of(1) == 2 * 32 * 8 * 128 * 2
    parameters = 8.03e9
    assert llama.weights == pytest.approx(2 * parameters, rel=1e-3)
    # Without the embedding and the head, which is computed for one token.
    linear = 2 * 1000 * (parameters - 2 * 4096 * 128256)
    attention = 4 * 32 * 4096 * (1000**2 / 2 + 1000 * 500)
    assert llama.operations(1000, 500) == pytest.approx(linear + attention, rel=1e-3)


def test_one_request_after_the_other_waits_for_its_own_work_only(fleet):
    shape, assumed = tiny(fleet), fleet.Assumed(servers=1, tokens=1000, memory=1e7, flops=1e9)
    full = fleet.Deployment(name="full", kept=1, stored=0.5)
    made = fleet.Fleet(shape, full, assumed)
    requests = [fleet.Request(document, 1000.0 * at) for at, document in enumerate((5, 5, 6))]
    made.run(requests)
    ask = shape.operations(64, 1000) / 1e9
    loading = 0.5 * shape.bytes_of(1000) / assumed.link
    waits = [request.first - request.came for request in requests]
    assert waits == pytest.approx([loading + ask, ask, loading + ask])
    assert [request.source for request in requests] == ["storage", "memory", "storage"]


def test_a_queue_waits_as_long_as_theory_says(fleet):
    """M/D/1: one server, prefills of one length, next to no decoding."""
    assumed = fleet.Assumed(
        servers=1, tokens=1000, memory=1e12, flops=1e9, bandwidth=1e18, answer=1, requests=20000
    )
    deployment = fleet.Deployment(name="each time", kept=0)
    made = fleet.Fleet(tiny(fleet), deployment, assumed)
    service = made.read + made.ask
    load = 0.7
    requests = made.requests(load / service)
    made.run(requests)
    mean = sum(request.first - request.came for request in requests) / len(requests)
    expected = service * (1 + load / (2 * (1 - load)))
    assert mean == pytest.approx(expected, rel=0.1)
    assert made.busy == pytest.approx(load, rel=0.05)


def test_the_least_recently_used_context_leaves_and_none_that_is_read(fleet):
    shape, assumed = tiny(fleet), fleet.Assumed(servers=1, tokens=1000, flops=1e9, bandwidth=1e9)
    full = fleet.Deployment(name="full", kept=1, stored=1)
    room = shape.weights + 2.5 * shape.bytes_of(1000)
    made = fleet.Fleet(shape, full, assumed.model_copy(update={"memory": room}))
    requests = [fleet.Request(d, 100.0 * at) for at, d in enumerate((1, 2, 1, 3, 1, 2))]
    made.run(requests)
    found = [request.source for request in requests]
    assert found == ["storage", "storage", "memory", "storage", "memory", "storage"]
    at_once = [fleet.Request(d, 1.0) for d in (1, 2, 3, 4)]
    made = fleet.Fleet(shape, full, assumed.model_copy(update={"memory": room}))
    server, most = made.servers[0], 0.0
    made.env.process(made._come(at_once))
    while made.env.peek() < 1000:
        made.env.step()
        most = max(most, server.used)
    assert most == 2 * shape.bytes_of(1000)
    assert all(request.first is not None for request in at_once)
