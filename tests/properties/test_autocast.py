# SPDX-License-Identifier: Apache-2.0
"""Caches inside torch.autocast: attention as stock's, and what kvfold computes as outside of it.

A float64 model is never cast, so that all of its numbers stay the same inside.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import CompressedCache, KvfoldError
from kvfold.kernels.full_precision import full_precision
from kvfold.observers.reconstruction import ContextReconstruction
from tests.helpers.budgets import EVICTING, NAMED, SMALL, compressed, moves, needs_driver
from tests.helpers.caches import ALONE, BATCHES, GREEDY, PADDED, positions
from tests.helpers.exactness import against_truth, assert_as_stock
from tests.helpers.models import build, continuation, prompts

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
COMPOSED = ["adakv:window=8 + every", "adakv:window=8 + turboquant:residual=8,sinks=2,end_layers=0"]
WITH_TEXT = ["kvzip", "kvzip + match", "kvzip + turboquant", "auto"]
TEXT = "The fox is red. The barn is old. " * 5 + "The code is 9032. " + "Birds sing here. " * 8
FAMILIES = ["llama", "qwen3", "gpt2", "gpt_oss", "gemma2", "gemma3n", "deepseek_v3", "jamba"]


def budget_of(spec: str) -> dict[str, float]:
    return {"budget": 0.5} if kvfold.parse(spec).takes_budget else {}


def inside(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", dtype)


@pytest.mark.slow
@pytest.mark.cases(3)
@DTYPES
@pytest.mark.parametrize("of_model", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_full_cache_is_stocks(name, of_model, dtype):
    if name in ("gpt2", "gemma3n") and dtype != of_model != torch.float32:
        pytest.skip("transformers' own forward fails")
    with inside(dtype):
        assert_as_stock(name, "full", SMALL, PADDED if name == "llama" else ALONE, of_model)


@torch.no_grad()
def answered(spec: str, model: torch.nn.Module) -> tuple[list[Tensor], CompressedCache]:
    """Logits of a prompt and of 20 tokens after it, and the cache."""
    cache, (ids, _) = compressed(model, spec), prompts(ALONE)
    if needs_driver(spec):
        kvfold.generate(model, ids, cache=cache, max_new_tokens=1, do_sample=False)
    tokens = [ids[:, cache.get_seq_length() :], *continuation(1, 20).split(1, 1)]
    return [model(new, past_key_values=cache).logits for new in tokens if new.numel()], cache


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("spec", [*NAMED, *COMPOSED])
def test_no_method_computes_in_16_bits(spec):
    if kvfold.parse(spec).stages().needs.get(ContextReconstruction) is not None:
        pytest.skip("needs a tokenizer: below")
    model = build("llama", torch.float64)
    expected, outside = answered(spec, model)
    with inside(torch.bfloat16):
        got, cache = answered(spec, model)
    assert all(map(torch.equal, got, expected))
    assert positions(cache) == positions(outside)


@pytest.mark.slow
@pytest.mark.cases(4)
@DTYPES
@pytest.mark.parametrize("of_model", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [*NAMED, *COMPOSED])
def test_every_method_answers(spec, of_model, dtype):
    if kvfold.parse(spec).stages().needs.get(ContextReconstruction) is not None:
        pytest.skip("needs a tokenizer: below")
    model = build("llama", of_model)
    if spec.startswith("pyramidinfer") and dtype != of_model != torch.float32:
        pytest.skip("its layers' cosines are wider, one by one: refused")
    with inside(dtype):
        logits, cache = answered(spec, model)
    assert all(each.dtype == dtype and each.isfinite().all() for each in logits)
    stored = {state.stored().keys.dtype for state in cache.states}
    stored |= {state.stored().values.dtype for state in cache.states}
    assert stored == {torch.bfloat16 if dtype == of_model else torch.float32}


@pytest.mark.slow
@pytest.mark.cases(2)
@BATCHES
@pytest.mark.parametrize("spec", [spec for spec in EVICTING if not moves(spec)])
def test_evicting_is_near_masked_dense(spec, lengths):
    with inside(torch.float16):
        off, effect, _ = against_truth("llama", spec, lengths, torch.float32, every_step=True)
    assert off <= 0.2 < 1.0 < effect


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("spec", WITH_TEXT)
def test_contexts_are_compressed_saved_and_edited(spec, tmp_path):
    model, tokenizer = kvfold.bundled_model()
    model = model.double()

    def used() -> list[object]:
        context = kvfold.compress(model, tokenizer, TEXT, spec, **budget_of(spec))
        span = context.span("The code is 9032.")
        context.save(tmp_path / "a.kvfold")
        loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
        chat = context.chat()
        answers = [chat.ask("Who?", max_new_tokens=20), chat.ask("And?", max_new_tokens=20)]
        answers.append(loaded.ask("Who?", max_new_tokens=4))
        edited = context.replace(span, "The code is 1.")
        answers.append("".join(edited.stream("Who?", max_new_tokens=4)))
        return [answers, positions(context.cache), positions(edited.cache)]

    expected = used()
    with inside(torch.bfloat16):
        assert used() == expected


@pytest.mark.whole
@DTYPES
@pytest.mark.parametrize("spec", [*WITH_TEXT, "turboquant", "kivi", "minicache", "sirllm"])
def test_contexts_of_a_cast_model(spec, dtype, tmp_path):
    model, tokenizer = kvfold.bundled_model()
    with inside(dtype):
        context = kvfold.compress(model, tokenizer, TEXT, spec, **budget_of(spec))
        answer = context.ask("Who?", max_new_tokens=20)
        context.save(tmp_path / "a.kvfold")
        loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
        assert loaded.ask("Who?", max_new_tokens=20) == answer
        context.append(" It is late.")
    assert loaded.ask("Who?", max_new_tokens=4)  # outside, where the model gives float32


@pytest.mark.parametrize("spec", ["adakv:window=8", COMPOSED[1]])
@pytest.mark.parametrize("options", [{"compress": "per_chunk"}, {}, {"num_beams": 2}])
def test_pieces_and_rows_are_as_outside(spec, options):
    (ids, mask), model, cast = prompts(PADDED), build("llama", torch.float64), build("llama")
    options = {"attention_mask": mask, "prefill_chunk": 16, **GREEDY, **options}
    whole = kvfold.generate(model, ids, cache=compressed(model, spec), **options)
    with inside(torch.bfloat16):
        got = kvfold.generate(model, ids, cache=compressed(model, spec), **options)
        kvfold.generate(cast, ids, cache=compressed(cast, spec), **options)
    assert torch.equal(got, whole)


def test_a_prompt_read_inside_is_answered_outside():
    model, (ids, _) = build("llama"), prompts(ALONE)
    cache = compressed(model, "adakv:window=8")
    with torch.no_grad(), inside(torch.bfloat16):
        model(ids, past_key_values=cache)
    other = copy.deepcopy(cache)
    with torch.no_grad():
        assert model(continuation(1, 1), past_key_values=cache).logits.dtype == torch.float32
    with torch.no_grad(), inside(torch.float16):
        assert model(continuation(1, 1), past_key_values=other).logits.dtype == torch.float16


def test_entries_that_would_be_rounded_are_refused():
    model, (ids, _) = build("llama", torch.bfloat16), prompts(ALONE)
    cache = compressed(model, "snapkv:window=8")
    with torch.no_grad():
        model(ids, past_key_values=cache)
        kept = positions(cache)
        with inside(torch.float16), pytest.raises(KvfoldError, match=r"holds torch\.bfloat16"):
            model(continuation(1, 1), past_key_values=cache)
        assert positions(cache) == kept
        model(continuation(1, 1), past_key_values=cache)


def test_a_graph_is_refused():
    model, (ids, _) = build("llama"), prompts(ALONE)
    cache = compressed(model, "snapkv:window=8")
    with inside(torch.bfloat16), pytest.raises(KvfoldError, match=r"torch\.autocast"):
        kvfold.generate(model, ids, cache=cache, compile=True, **GREEDY)


def test_a_function_of_full_precision_leaves_autocast():
    ones = torch.ones(2, 2) / 3
    with inside(torch.bfloat16):
        assert (ones @ ones).dtype == torch.bfloat16
        assert full_precision(torch.matmul)(ones, ones).dtype == torch.float32
        assert (ones @ ones).dtype == torch.bfloat16


@pytest.mark.slow
def test_adapters_of_16_bits_are_told_apart():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build("llama", torch.bfloat16), config).bfloat16()
    with torch.no_grad(), inside(torch.float16):
        cache = compressed(model.base_model.model, "snapkv:window=8")
        model(prompts(ALONE)[0], past_key_values=cache)
        next(p for name, p in model.named_parameters() if "lora_A" in name).add_(1)
        with pytest.raises(KvfoldError, match="weights or scales are others"):
            model(continuation(1, 2), past_key_values=cache)
