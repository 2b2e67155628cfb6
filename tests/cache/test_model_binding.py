# SPDX-License-Identifier: Apache-2.0
"""A cache belongs to one model, and does not keep it alive."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import kvfold
from kvfold import CompressedCache, KvfoldError, UnsupportedModel
from kvfold.cache import model_binding
from kvfold.contexts.session import Session
from tests.helpers.caches import GREEDY
from tests.helpers.contexts import DOCUMENT, QUESTION
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader


@pytest.fixture
def model():
    return build("llama")


@pytest.mark.parametrize("names", [("llama", "llama"), ("llama", "gpt2")])
def test_a_cache_works_with_its_own_model_only(names):
    mine, other = (build(name, seed=i) for i, name in enumerate(names))
    kvfold.enable(other)
    cache = CompressedCache(mine, "knorm", 20)
    with pytest.raises(UnsupportedModel, match="another model"):
        Reader(other, cache)(prompts((64,))[0])


@pytest.mark.parametrize("read", [0, 64], ids=["fresh", "filled"])
def test_a_cache_with_another_model_that_was_never_enabled_is_refused(read):
    model, other = build("llama"), build("llama", seed=1)
    cache = CompressedCache(model, "knorm", 20)
    ids = prompts((65,))[0]
    if read:
        Reader(model, cache)(ids[:, :read])
    with pytest.raises(UnsupportedModel, match="kvfold's attention"):
        Reader(other, cache)(ids[:, read:])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_single_layer_that_attends_without_kvfold_is_refused(family):
    ids = prompts((34,))[0]
    own = CompressedCache(build(family), "knorm", 20)
    for layer in set(range(len(own.layers))) - own.other_layers().keys():
        model = build(family)
        cache = CompressedCache(model, "knorm", 20)
        read = Reader(model, cache)
        read(ids[:, :32])
        attention = model.model.layers[layer].self_attn
        attention.config = copy.copy(attention.config)
        attention.config._attn_implementation = "sdpa"
        with pytest.raises(UnsupportedModel, match="kvfold's attention"):
            for token in ids[:, 32:].split(1, 1):  # that the last layer did shows in the next read
                read(token)


def test_a_cache_does_not_keep_its_model_alive():
    model = build("llama")
    cache = CompressedCache(model, "streaming_llm", 20)
    Reader(model, cache)(prompts((64,))[0])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and len(cache.positions(0)[0][0]) == 20


def edited(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)


def swapped(model):
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data.copy_(weight.data + 1)  # of which torch counts no version


def replaced(model):
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight + 1)


def turned(model):
    model.model.rotary_emb.inv_freq.mul_(1.5)


CHANGES = [(edited, "weights"), (swapped, "weights"), (replaced, "weights"), (turned, "RoPE")]


@pytest.mark.parametrize(("change", "what"), CHANGES)
def test_a_model_that_was_changed_between_turns_is_refused(change, what, model, tmp_path):
    tokenizer, ids = word_tokenizer(), prompts((64,))[0]
    context = kvfold.compress(model, tokenizer, DOCUMENT, "knorm", 40)
    chat, session = context.chat(), Session(context)
    chat.ask(QUESTION, max_new_tokens=2)
    cache = CompressedCache(model, "knorm", 20)
    reader = Reader(model, cache)
    reader(ids)
    change(model)
    for turn in (
        lambda: reader(continuation(1, 5)),
        lambda: kvfold.generate(model, torch.cat([ids, continuation(1, 1)], 1), cache=cache),
        lambda: context.ask(QUESTION, max_new_tokens=2),
        lambda: chat.ask(QUESTION, max_new_tokens=2),
        lambda: session.ask(QUESTION, max_new_tokens=2),
        lambda: context.drop((5, 9)),
        lambda: context.save(tmp_path / "mixed.kvfold"),
    ):
        with pytest.raises(KvfoldError, match=f"a model whose {what} .* since"):
            turn()
    assert not (tmp_path / "mixed.kvfold").exists()
    cache.reset()
    reader(ids)


def test_a_cache_that_begins_anew_may_be_read_by_a_changed_model(model):
    ids = prompts((64,))[0]
    cache = CompressedCache(model, "full")
    kvfold.generate(model, ids, cache=cache, **GREEDY)
    edited(model)
    other = ids.flip(1)
    expected = model.generate(other, **GREEDY)
    made = kvfold.generate(model, other, cache=cache, reuse="prefix", **GREEDY)
    assert torch.equal(made, expected)


def test_weights_are_not_compared_at_each_step(model, monkeypatch):
    ids, seen = prompts((64,))[0], []
    cache, own = CompressedCache(model, "knorm", 20), model_binding.read_by
    monkeypatch.setattr(
        model_binding, "read_by", lambda *given, **named: seen.append(1) or own(*given, **named)
    )
    made = kvfold.generate(model, ids, cache=cache, prefill_chunk=16, **GREEDY)
    assert len(seen) == 1
    kvfold.generate(model, torch.cat([made, continuation(1, 3)], 1), cache=cache, **GREEDY)
    assert len(seen) == 2
