# SPDX-License-Identifier: Apache-2.0
"""Caches with and without gradients: right logits in every mode, and no gradient that is wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import CompressedCache, KvfoldError
from kvfold.cache.fork import fork
from tests.helpers.budgets import METHODS, compressed
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import PROMPT, tiny_llama, word_tokenizer

STEPS = (64, 1, 1, 3, 1)
TEXT = torch.cat([prompts((64,))[0], continuation(1, 6)], 1)


@pytest.fixture(scope="module")
def model():
    return build("llama")


def logits(model, cache: CompressedCache, modes) -> Tensor:
    """Logits of all tokens, read in `STEPS`, each under one of the modes."""
    out, at = [], 0
    for step, mode in zip(STEPS, modes, strict=True):
        with mode():
            read = model(TEXT[:, at : at + step], past_key_values=cache)
        out.append(read.logits.detach())
        at += step
    return torch.cat(out, 1)


@pytest.mark.slow
@pytest.mark.cases(8)
@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("first", [torch.no_grad, torch.enable_grad])
def test_logits_are_the_same_with_gradients_enabled(model, spec, first):
    expected = logits(model, compressed(model, spec), [torch.no_grad] * len(STEPS))
    modes = [first, torch.enable_grad, torch.no_grad, torch.enable_grad, torch.enable_grad]
    assert torch.allclose(logits(model, compressed(model, spec), modes), expected, atol=1e-6)


def test_a_forward_after_generating_needs_no_mode(model):
    cache = CompressedCache(model, "snapkv", 40)
    ids = kvfold.generate(model, TEXT, cache=cache, max_new_tokens=3, do_sample=False)
    assert model(ids[:, -1:], past_key_values=cache).logits.shape == (1, 1, 199)


def test_gradients_through_a_cache_are_refused_and_others_are_stock(model):
    stock = build("llama")
    loss = stock(TEXT, labels=TEXT).loss
    loss.backward()
    kvfold.enable(model)
    model(TEXT, labels=TEXT).loss.backward()
    for mine, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    cached = model(TEXT, labels=TEXT, past_key_values=CompressedCache(model, "full")).loss
    assert torch.allclose(cached, loss)
    with pytest.raises(KvfoldError, match="no gradient passes through a kvfold cache"):
        cached.backward()


def test_a_cache_filled_in_inference_mode_says_so_outside(model):
    cache = CompressedCache(model, "snapkv", 40)
    with torch.inference_mode():
        model(TEXT[:, :64], past_key_values=cache)
        model(TEXT[:, 64:65], past_key_values=cache)
    with pytest.raises(KvfoldError, match=r"inside torch\.inference_mode\(\)"), torch.no_grad():
        model(TEXT[:, 65:66], past_key_values=cache)


def test_a_context_made_in_inference_mode_answers_outside():
    model, tokenizer = tiny_llama(), word_tokenizer()
    with torch.inference_mode():
        context = kvfold.compress(model, tokenizer, PROMPT, "snapkv", 40)
    expected = kvfold.compress(model, tokenizer, PROMPT, "snapkv", 40).ask("is the sky blue")
    assert context.ask("is the sky blue") == expected


@pytest.mark.cases(3)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "bamba"])
@pytest.mark.parametrize("spec", ["snapkv:window=8", "full", "adakv:window=8", "kivi:group=8"])
def test_caches_filled_with_gradients_are_copied_forked_and_frozen(family, spec):
    """Layers that stay transformers' own keep no graph: torch copies no tensor inside one."""
    model, later = build(family), continuation(1, 3)
    budget = 20 if kvfold.parse(spec).takes_budget else None
    cache, other = (CompressedCache(model, spec, budget) for _ in range(2))
    for each in (cache, other):
        with torch.set_grad_enabled(each is cache):
            for tokens in (prompts((40,))[0], *later.split(1, 1)):
                model(tokens, past_key_values=each)
    copied, forked = copy.deepcopy(cache), fork(cache)
    with cache.frozen():
        model(later, past_key_values=cache)
        cache.crop(-3)
    with torch.no_grad():
        expected = model(later, past_key_values=other).logits
    for each in (cache, copied, forked):
        torch.testing.assert_close(model(later, past_key_values=each).logits, expected)
        copy.deepcopy(each)


def test_logits_that_a_method_reads_are_copied_without_their_gradients():
    model = build("llama")
    cache = CompressedCache(model, "sirllm", 20)
    model(prompts((40,))[0], past_key_values=cache)
    assert str(copy.deepcopy(cache).positions(1)) == str(cache.positions(1))
    with cache.frozen():
        model(continuation(1, 3), past_key_values=cache)
        cache.crop(-3)
