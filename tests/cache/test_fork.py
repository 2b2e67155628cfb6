# SPDX-License-Identifier: Apache-2.0
"""Questions to one context: side by side, one after the other, piece by piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvfold
from kvfold import KvfoldError
from kvfold.cache.fork import fork
from tests.helpers.chats import compressed, held, same, storages
from tests.helpers.contexts import DOCUMENT, KINDS, QUESTION, new_model
from tests.helpers.tokenizers import word_tokenizer

EVERY = pytest.mark.parametrize("spec", KINDS)


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def reachable(*caches: kvfold.CompressedCache) -> int:
    return sum(storages([cache.layers for cache in caches], {}, set()).values())


@pytest.mark.slow
@pytest.mark.cases(2)
@EVERY
def test_a_reader_gives_the_logits_that_the_cache_itself_would(model, tokenizer, spec):
    context = compressed(model, tokenizer, spec)
    reader = fork(context.cache)
    ids = torch.randint(3, 12, (1, 20), generator=torch.Generator().manual_seed(1))
    pieces = (ids[:, :12], *ids[:, 12:].split(1, 1))
    for _ in range(2):
        with torch.no_grad():
            theirs = [model(p, past_key_values=reader, use_cache=True).logits for p in pieces]
        reader.crop(-20)
        with torch.no_grad(), context.cache.frozen():
            own = [model(p, past_key_values=context.cache, use_cache=True).logits for p in pieces]
        context.cache.crop(-20)
        for one, other in zip(theirs, own, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert [p.tolist() for p in reader.positions(0)[0]] == [
        p.tolist() for p in context.cache.positions(0)[0]
    ]


@pytest.mark.cases(1)
@pytest.mark.slow
@EVERY
def test_a_hundred_readers_cost_one_context_and_a_hundred_tails(model, tokenizer, spec):
    context = compressed(model, tokenizer, spec, " ".join([DOCUMENT] * 6))
    alone = reachable(context.cache)
    readers = [fork(context.cache) for _ in range(100)]
    question = torch.tensor([[4, 5, 6, 7, 8]])
    with torch.no_grad():
        for reader in readers:
            model(question, past_key_values=reader, use_cache=True)
    together = reachable(context.cache, *readers)
    shapes = [layer.keys.shape for layer in context.cache.compressed_layers]
    entry = sum(2 * 4 * shape[1] * shape[3] for shape in shapes)
    # Beside its five tokens a reader has room for 16 more, and positions of what it holds.
    tail = entry * (5 + 16) * 1.3
    assert alone < together < alone + 100 * tail
    assert all(reader.get_seq_length() == context.stats().seen + 5 for reader in readers)


@pytest.mark.whole
def test_readers_leave_the_context_alone(model, tokenizer):
    for spec in KINDS:
        context = compressed(model, tokenizer, spec)
        for layer in context.cache.states:
            layer.settle_sinks()
        before, stats = held(context), context.stats()
        chat = context.chat()
        chat.ask(QUESTION, max_new_tokens=30)
        chat.ask(QUESTION, max_new_tokens=3, keep=False)
        chat.drop()
        context.ask(QUESTION, max_new_tokens=8)
        assert same(before, held(context)) and context.stats() == stats


def test_a_reader_cannot_go_back_before_its_beginning(model, tokenizer):
    reader = fork(compressed(model, tokenizer, "snapkv").cache)
    with torch.no_grad():
        model(torch.tensor([[4, 5]]), past_key_values=reader, use_cache=True)
    with pytest.raises(KvfoldError, match="cannot take back 3 tokens"):
        reader.crop(-3)
    reader.crop(-2)


def test_a_reader_belongs_to_the_model_of_its_context(model, tokenizer):
    reader = fork(compressed(model, tokenizer, "snapkv").cache)
    other = new_model()
    kvfold.enable(other)
    with pytest.raises(kvfold.UnsupportedModel, match="made for another model"), torch.no_grad():
        other(torch.tensor([[4, 5]]), past_key_values=reader, use_cache=True)


def test_a_context_whose_cache_was_used_answers_nothing(model, tokenizer):
    context = compressed(model, tokenizer, "snapkv")
    with torch.no_grad():
        model(torch.tensor([[4, 5]]), past_key_values=context.cache, use_cache=True)
    with pytest.raises(KvfoldError, match="leave its cache alone"):
        context.ask(QUESTION)


def test_a_reader_evicts_nothing(model, tokenizer):
    context = compressed(model, tokenizer, "h2o")
    reader = fork(context.cache)
    with torch.no_grad(), reader.reading():
        model(torch.randint(3, 12, (1, 90)), past_key_values=reader, use_cache=True)
    kept = context.stats().kept[0][0][0]
    assert reader.stats().kept[0][0][0] == kept + 90
    assert reader.stats().seen == context.stats().seen + 90


@pytest.mark.slow
def test_rows_of_a_reader_multiply(model, tokenizer):
    for spec in ("snapkv", "adakv"):
        context = compressed(model, tokenizer, spec)
        before, reader = held(context), fork(context.cache)
        reader.batch_repeat_interleave(2)
        ids = torch.tensor([[4, 5, 6], [7, 8, 9]])
        with torch.no_grad():
            both = model(ids, past_key_values=reader, use_cache=True).logits
            for row in range(2):
                alone = model(ids[row : row + 1], past_key_values=fork(context.cache)).logits
                torch.testing.assert_close(both[row : row + 1], alone, rtol=0, atol=1e-5)
        assert same(before, held(context))
