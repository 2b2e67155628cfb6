# SPDX-License-Identifier: Apache-2.0
"""capture=True on a CPU: the contract of a CUDA graph, and what eager decoding gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import CompileConfig

import kvfold
from kvfold import CompressedCache, KvfoldError, UnsupportedModel
from kvfold.generation.static import captured
from kvfold.hf.versions import CACHE
from tests.helpers.budgets import NAMED, SMALL, compressed
from tests.helpers.captured import NoHost, watching
from tests.helpers.compiled import (
    ALONE,
    DENSE,
    ENCODED,
    GREEDY,
    HOLDING,
    LOGITS,
    PADDED,
    Streamer,
    check_same,
    small,
)
from tests.helpers.models import build, continuation, prompts

RAGGED = "adakv:window=8"
RECALL = next(spec for spec in ENCODED if "recall" in spec)
STATIC = [spec for spec in (*DENSE, RAGGED, *ENCODED, *HOLDING) if spec != RECALL]
LONG = {"do_sample": False, "max_new_tokens": 101}


@pytest.fixture(scope="module")
def model():
    return small("llama")


def both(
    model: Any, spec: str, lengths: tuple[int, ...], budget: float | str = SMALL, **options: Any
) -> Any:
    """Outputs and caches of the same prompts, eager and captured."""
    ids, mask = prompts(lengths)
    caches = compressed(model, spec, budget), compressed(model, spec, budget)
    outs = [
        kvfold.generate(model, ids, cache=cache, attention_mask=mask, **how, **options)
        for cache, how in zip(caches, ({}, {"capture": True}), strict=True)
    ]
    return outs, caches


@pytest.mark.cases(2)
@pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
@pytest.mark.parametrize("spec", STATIC)
def test_replays_move_nothing_wait_for_nothing_and_give_the_eager_tokens(
    model, spec, lengths, monkeypatch
):
    watch = watching(monkeypatch)
    outs, caches = both(model, spec, lengths, **LONG, **LOGITS)
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    for expected, got in zip(outs[0].logits, outs[1].logits, strict=True):
        # Codes whose scale has 16 bits: its rounding may differ by the last bit.
        torch.testing.assert_close(got, expected, atol=1e-2 if "quant" in spec else 1e-5, rtol=1e-5)
    assert outs[1].past_key_values is caches[1]
    check_same(*caches, atol=2**-8 if "quant" in spec else 1e-5)
    assert watch.steps.count("replay") + watch.steps.count("warm") == 100
    assert watch.steps.count("replay") > 80


@pytest.mark.cases(2)
@pytest.mark.parametrize("spec", STATIC)
def test_the_kernels_of_a_gpu_move_nothing_and_wait_for_nothing(
    model, spec, interpreted, monkeypatch
):
    planned = pytest.importorskip("kvfold.kernels.planned")  # which needs Triton
    plan_for = Mock(wraps=planned.plan_for)
    monkeypatch.setattr(planned, "plan_for", plan_for)
    watch = watching(monkeypatch)
    outs, caches = both(model, spec, ALONE, do_sample=False, max_new_tokens=5)
    assert torch.equal(*outs)
    check_same(*caches)
    # Layers that evict at every step note their weights: torch attends, as it does to think's keys.
    assert plan_for.called != (spec in HOLDING or spec.startswith("think"))
    assert watch.steps.count("replay") > 1


@pytest.mark.whole
@pytest.mark.parametrize("lengths", [ALONE, PADDED], ids=["alone", "padded"])
def test_every_method_is_captured_or_refused(model, lengths, monkeypatch):
    watching(monkeypatch)
    for spec in (spec for spec in NAMED if not spec.startswith("kvzip")):  # needs a tokenizer
        try:
            outs, _ = both(model, spec, lengths, **LONG)
        except KvfoldError as error:
            assert captured.eager_because(compressed(model, spec)) in str(error)
            continue
        assert captured.eager_because(compressed(model, spec)) is None
        assert torch.equal(*outs), spec


def test_layers_are_made_anew_when_their_bucket_is_full(model, monkeypatch):
    monkeypatch.setattr(captured, "BUCKET", 7)
    watch = watching(monkeypatch)
    for spec in ("snapkv:window=8", RAGGED, "h2o"):
        watch.steps.clear()
        outs, caches = both(model, spec, PADDED, do_sample=False, max_new_tokens=30)
        assert torch.equal(*outs)
        check_same(*caches)
        # 29 steps: four buckets and a begun one; layers that evict go on in their own buffers.
        assert watch.steps.count("warm") == (1 if spec == "h2o" else 5)


@pytest.mark.parametrize("spec", ["h2o", "d2o"])
def test_layers_that_are_not_full_yet_are_made_anew_until_they_are(model, spec, monkeypatch):
    """A budget above the prompt: nothing has left when the first buckets are full."""
    monkeypatch.setattr(captured, "BUCKET", 7)
    watch = watching(monkeypatch)
    outs, caches = both(model, spec, PADDED, budget=80, do_sample=False, max_new_tokens=40)
    assert torch.equal(*outs)
    check_same(*caches)
    assert watch.steps.count("warm") == 4  # at 64, 71, 78 and 80 or more entries


@pytest.mark.cases(1)
@pytest.mark.parametrize("spec", ["snapkv:window=8", RAGGED, ENCODED[0], "h2o"])
def test_the_next_turn_and_another_batch_go_on(model, spec):
    outs, caches = both(model, spec, ALONE, **GREEDY)
    for copies in (1, 3):
        text = torch.cat([outs[0], continuation(1, 20, copies)], 1)
        options = {"num_return_sequences": copies, "do_sample": copies > 1, "max_new_tokens": 20}
        outs = []
        for cache, how in zip(caches, ({}, {"capture": True}), strict=True):
            torch.manual_seed(3)
            outs.append(kvfold.generate(model, text, cache=cache, **how, **options))
        assert torch.equal(*outs)
        check_same(*caches, atol=2**-8)


def test_logits_processors_may_read_the_host(model):
    def forbid(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, input_ids[0, -1].item()] = -torch.inf
        return scores

    outs, _ = both(model, "h2o", ALONE, logits_processor=[forbid], **LONG)
    assert torch.equal(*outs)
    assert not bool((outs[1][:, 64:] == outs[1][:, 63:-1]).any())


class Overwriting:
    """As a CUDA graph: the first replay's output is where all later ones write theirs."""

    def warm_up(self, step: Any) -> Any:
        return step()

    def record(self, step: Any) -> Any:
        kept: list[Any] = []

        def replay() -> Any:
            out = step()
            kept.append(out)
            for old, new in zip(kept[0].hidden_states, out.hidden_states, strict=True):
                old.copy_(new)
            kept[0].logits.copy_(out.logits)
            return kept[0]

        return replay


def test_what_a_step_returns_is_the_callers(model, monkeypatch):
    monkeypatch.setattr(captured, "recorder_for", lambda device: Overwriting())
    states = {"output_hidden_states": True}
    outs, _ = both(model, "snapkv:window=8", ALONE, **GREEDY, **LOGITS, **states)
    for name in ("logits", "hidden_states"):
        # The prompt's states come first, and are transformers'.
        for expected, got in zip(
            getattr(outs[0], name)[1:], getattr(outs[1], name)[1:], strict=True
        ):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_after_an_error_the_cache_holds_what_was_read(model):
    outs, (expected, _) = both(model, RAGGED, ALONE, do_sample=False, max_new_tokens=5)
    cache = compressed(model, RAGGED)
    ids = prompts(ALONE)[0]
    with pytest.raises(RuntimeError, match="line is dead"):
        kvfold.generate(model, ids, cache=cache, streamer=Streamer(5), capture=True, **GREEDY)
    check_same(expected, cache)
    assert "get_compiled_call" not in vars(model)
    text = torch.cat([outs[0], continuation(1, 9)], 1)
    again = [kvfold.generate(model, text, cache=c, **GREEDY) for c in (expected, cache)]
    assert torch.equal(*again)


def test_questions_to_a_frozen_cache_are_answered_and_taken_back(model):
    for spec in ("snapkv:window=8", RAGGED, ENCODED[0], "h2o"):
        cache, text = compressed(model, spec), torch.cat([prompts(ALONE)[0], continuation(1, 9)], 1)
        kvfold.generate(model, text[:, :64], cache=cache, max_new_tokens=1)
        outs = []
        for how in ({}, {"capture": True}):
            with cache.frozen():
                outs.append(kvfold.generate(model, text, cache=cache, **how, **GREEDY))
                cache.crop(64 - cache.get_seq_length())
        assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("spec", "options", "reason"),
    [
        (RECALL, {}, "entries of the CPU's memory"),
        ("streaming_llm", {}, "capture=True does not go with streaming_llm, which moves its sinks"),
        ("rkv:window=8", {}, "evicts many entries at once"),
        ("full", {"num_beams": 2}, "beams"),
        ("full", {"prompt_lookup_num_tokens": 3}, "assisted"),
        ("full", {"compile": True}, "choose one"),
        ("full", {"disable_compile": True}, "disable_compile=True: choose one"),
        ("full", {"compile_config": CompileConfig()}, "compiles nothing"),
    ],
)
def test_what_no_graph_can_do_is_refused_before_anything_is_read(model, spec, options, reason):
    refused(model, spec, KvfoldError, reason, **options)


def test_autocast_is_refused(model):
    with torch.autocast("cpu", torch.bfloat16):
        refused(model, "full", KvfoldError, "torch.autocast")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gemma3", {"num_hidden_layers": 4}, "sliding window"),
        ("mixtral", {}, "experts one by one"),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 2,
                    "long_factor": [2.0] * 2,
                },
                "original_max_position_embeddings": 4096,
            },
            "whether its text is long",
        ),
    ],
)
def test_models_whose_step_asks_the_host_are_refused(name, changes, reason):
    refused(build(name, **changes), "snapkv:window=8", UnsupportedModel, reason)


def test_weights_that_transformers_does_not_compile_are_refused():
    """It would call the model itself, step by step."""
    model = small("llama")
    model.hf_quantizer = SimpleNamespace(is_compileable=False)
    refused(model, "full", UnsupportedModel, "quantized weights of a kind")


def refused(model: Any, spec: str, error: Any, reason: str, **options: Any) -> None:
    cache = compressed(model, spec, 40)
    with pytest.raises(error, match=reason):
        kvfold.generate(model, prompts(ALONE)[0], cache=cache, capture=True, **options)
    assert cache.get_seq_length() == 0


def test_the_watch_sees_what_waits_for_the_host():
    numbers = torch.arange(3)
    for waits in (numbers.max().item, numbers.nonzero, lambda: numbers[numbers > 1]):
        with pytest.raises(AssertionError), NoHost():
            waits()
    with NoHost():
        numbers.add_(1).where(numbers > 1, 0)


def test_another_cache_is_read_as_ever(model):
    """As where another thread generates meanwhile."""
    ids = prompts(ALONE)[0]
    handed = captured.CapturedCache(CompressedCache(model, "full"), room=1)
    step = captured.CapturedStep(model, handed, captured.recorder_for(model.device))
    with torch.no_grad():
        cache = CompressedCache(model, "full")
        out = step(input_ids=ids, **{CACHE: cache})
    assert cache.get_seq_length() == 64 and torch.equal(out.logits, model(ids).logits)
