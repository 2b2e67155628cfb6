# SPDX-License-Identifier: Apache-2.0
"""What compiled decoding refuses, and what it does after an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

import kvfold
from kvfold import CompressedCache, KvfoldError, UnsupportedModel
from kvfold.cache.layer import CompressedLayer
from tests.helpers.budgets import compressed
from tests.helpers.compiled import (
    ALONE,
    COMPILED,
    ENCODED,
    GREEDY,
    Streamer,
    both,
    check_same,
    refused,
    small,
)
from tests.helpers.models import build, continuation, prompts

# Each graph takes seconds to compile.
pytestmark = pytest.mark.slow
RAGGED = "adakv:window=8"


@pytest.fixture
def model():
    torch._dynamo.reset()
    counters.clear()
    return small("llama")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "spec",
    [
        "kivi:group=8,residual=8",
        "turboquant:residual=8,sinks=2",
        "recall:residual=8,read=0.2",
        *ENCODED[3:],
    ],
)
def test_nothing_may_be_encoded_when_decoding_begins(model, spec):
    ids = prompts((6,))[0]
    caches = [CompressedCache(model, spec) for _ in range(2)]
    outs = [
        kvfold.generate(model, ids, cache=cache, do_sample=False, max_new_tokens=40, **how)
        for cache, how in zip(caches, ({}, COMPILED), strict=True)
    ]
    assert torch.equal(*outs)
    # Scales of 16 bits: a product that a compiler rounds otherwise may flip the last one.
    check_same(*caches, atol=2**-8)


def test_after_an_error_the_cache_holds_what_was_read(model):
    outs, (expected, _) = both(model, "snapkv:window=8", max_new_tokens=5)
    cache = compressed(model, "snapkv:window=8")
    ids = prompts(ALONE)[0]
    with pytest.raises(RuntimeError, match="line is dead"):
        kvfold.generate(model, ids, cache=cache, streamer=Streamer(5), **GREEDY, **COMPILED)
    check_same(expected, cache)
    text = torch.cat([outs[0], continuation(1, 9)], 1)
    again = [kvfold.generate(model, text, cache=c, **GREEDY) for c in (expected, cache)]
    assert torch.equal(*again)


@pytest.mark.cases(1)
@pytest.mark.parametrize("spec", [RAGGED, ENCODED[0]])
def test_a_cache_whose_step_broke_off_is_refused(model, spec, monkeypatch):
    cache, ids = compressed(model, spec), prompts(ALONE)[0]
    whole, calls = CompressedLayer.finish, []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2 + 4:  # in the last of two layers, two tokens after the prompt
            raise MemoryError("no room")
        whole(*args)

    monkeypatch.setattr(CompressedLayer, "finish", failing)
    with pytest.raises(MemoryError, match="no room"):
        kvfold.generate(model, ids, cache=cache, **GREEDY, **COMPILED)
    with pytest.raises(UnsupportedModel, match="make a new cache"):
        kvfold.generate(model, torch.cat([ids, continuation(1, 9)], 1), cache=cache, **GREEDY)


@pytest.mark.cases(2)
@pytest.mark.parametrize("spec", ["snapkv:window=8", "h2o", RAGGED])
def test_a_step_that_failed_when_its_token_was_stored_is_not_read_on(model, spec):
    calls: list[int] = []

    def failing(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            out = graph.forward(*args)
            calls.append(1)
            if len(calls) == 6:  # the third step, in the last of two layers
                raise MemoryError("no room")
            return out

        return run

    ids = prompts(ALONE)[0]
    cache, whole = compressed(model, spec), compressed(model, spec)
    text = kvfold.generate(model, ids, cache=whole, **(GREEDY | {"max_new_tokens": 3}))
    text = torch.cat([text, continuation(1, 9)], 1)
    name = f"failing_{id(calls)}"  # of a configuration only texts are taken
    torch._dynamo.register_backend(failing, name=name)
    once = {"compile_config": CompileConfig(fullgraph=True, backend=name, mode=None)}
    with pytest.raises(MemoryError, match="no room"):
        kvfold.generate(model, ids, cache=cache, compile=True, **once, **GREEDY)
    for options in (GREEDY, GREEDY | COMPILED):
        with pytest.raises(KvfoldError, match="stored its 1 tokens"):
            kvfold.generate(model, text, cache=cache, **options)
    if spec == "h2o":
        with pytest.raises(KvfoldError, match="evicted"):
            cache.crop(-1)
        return
    cache.crop(-1)
    check_same(whole, cache)
    again = [kvfold.generate(model, text, cache=c, **GREEDY) for c in (whole, cache)]
    assert torch.equal(*again)


def test_a_prompt_that_failed_when_it_was_stored_is_not_read_on(model):
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    cache, ids = compressed(model, "full"), prompts(ALONE)[0]
    handle = model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        kvfold.generate(model, ids, cache=cache, **GREEDY, **COMPILED)
    handle.remove()
    with pytest.raises(KvfoldError, match="stored its 64 tokens"):
        kvfold.generate(model, torch.cat([ids, ids], 1), cache=cache, **GREEDY, **COMPILED)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("cam", "merges an evicted entry into many others"),
        ("simlayerkv:when=first_decode", "may still compress"),
        ("h2o:decode=append", "adds up attention"),
        ("streaming_llm", "moves its sinks"),
    ],
)
def test_methods_that_do_more_at_a_step_are_refused(model, spec, reason):
    refused(model, spec, KvfoldError, reason)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gemma3", {"num_hidden_layers": 4}, "sliding window"),
        ("qwen3_5", {"num_hidden_layers": 4}, "recurrent state"),
        ("deepseek_v3", {}, "latents"),
        ("mixtral", {}, "experts one by one"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
            "rotary frequencies",
        ),
    ],
)
def test_models_that_one_graph_cannot_answer_for_are_refused(name, changes, reason):
    refused(build(name, **changes), "snapkv:window=8", UnsupportedModel, reason)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"num_beams": 2}, "beams"), ({"prompt_lookup_num_tokens": 3}, "assisted")],
)
def test_beams_and_assistants_are_refused(model, options, reason):
    refused(model, "snapkv:window=8", KvfoldError, reason, **options)
