# SPDX-License-Identifier: Apache-2.0
"""Chats of a context: turns that are kept, templates between them, streams that end early."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import kvfold
from kvfold import KvfoldError
from kvfold.hf.chat_template import PromptFrame
from tests.helpers.chats import QUESTIONS, TEMPLATE, compressed, expected
from tests.helpers.contexts import DOCUMENT, KIVI, QUESTION, new_model
from tests.helpers.tokenizers import word_tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["snapkv", "adakv", KIVI, "minicache", "streaming_llm"])
def test_threads_get_the_answers_they_would_get_alone(model, tokenizer, spec):
    context = compressed(model, tokenizer, spec)
    alone = [context.ask(question, max_new_tokens=8) for question in QUESTIONS]
    fresh = compressed(model, tokenizer, spec)
    with ThreadPoolExecutor(6) as pool:
        asked = pool.map(lambda q: fresh.ask(q, max_new_tokens=8), QUESTIONS * 2)
        streamed = pool.map(lambda q: "".join(fresh.stream(q, max_new_tokens=8)), QUESTIONS)
        assert list(asked) == alone * 2
        assert [text.strip() for text in streamed] == alone
    assert len(set(alone)) > 3


def test_chats_of_one_context_do_not_see_each_other(model, tokenizer):
    context = compressed(model, tokenizer, "adakv")
    lone = context.chat()
    alone = [lone.ask(question, max_new_tokens=6) for question in QUESTIONS[:3]]
    one, other = context.chat(), context.chat()
    found = []
    for question in QUESTIONS[:3]:
        found.append(one.ask(question, max_new_tokens=6))
        other.ask(question[::-1], max_new_tokens=9)
    assert found == alone


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_turns_that_are_kept_are_seen_and_others_are_not(tokenizer, family):
    model = new_model(family)
    context = compressed(model, tokenizer, "snapkv")
    one, two, three = QUESTIONS[1:4]
    chat = context.chat()
    first = chat.ask(one, max_new_tokens=5)
    assert first == expected(context, f"\n\n{one}\n", 5) == context.ask(one, max_new_tokens=5)
    conversation = f"\n\n{one}\n{first}\n\n"
    aside = chat.ask(three, keep=False, max_new_tokens=5)
    assert aside == expected(context, f"{conversation}{three}\n", 5)
    second = chat.ask(two, max_new_tokens=5)
    assert second == expected(context, f"{conversation}{two}\n", 5)
    assert chat.turns == 2
    chat.drop()
    assert chat.ask(three, max_new_tokens=5) == aside and chat.turns == 2
    chat.drop(2)
    assert chat.turns == 0 and torch.equal(chat.ids, context.ids)
    assert chat.ask(two, max_new_tokens=5) == context.ask(two, max_new_tokens=5)
    with pytest.raises(KvfoldError, match="2 turns cannot be dropped of 1"):
        chat.drop(2)


@pytest.mark.parametrize("bos", [True, False])
def test_without_a_chat_template_questions_and_answers_are_paragraphs(bos):
    """docs/python.md, "Base models": and KVzip protects the BOS token alone."""
    model, tokenizer = kvfold.bundled_model()
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = None
    tokenizer.bos_token = tokenizer.eos_token if bos else None
    text = "The locker of Aiko Berg is 48213. It was a quiet evening in the garden. " * 4
    context = kvfold.compress(model, tokenizer, text, "kvzip", 0.3)
    assert context.stats().protected == [int(bos)]
    assert not bos or all(
        head[0] == 0 for at in range(len(context.stats().layers))
        for head in context.cache.positions(at)[0]
    )  # fmt: skip
    chat = context.chat()
    chat.add("Whose is it?", "Aiko's.", answer_prefix="It is ")
    chat.add("Which?", "48213.")
    opening = tokenizer.bos_token or ""
    said = "\n\nWhose is it?\nIt is Aiko's.\n\nWhich?\n48213."
    assert tokenizer.decode(chat.ids[0]) == f"{opening}{text}{said}"


def test_a_template_stands_between_turns(model):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    frame = PromptFrame.of(tokenizer)
    assert frame == PromptFrame("<user> ", " </s> <assistant> ", " </s> <user> ")
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    assert PromptFrame.of(tokenizer) == PromptFrame("", "!", None)
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)
    chat = context.chat()
    chat.ask(QUESTION, max_new_tokens=2)
    with pytest.raises(KvfoldError, match="no second turn"):
        chat.ask(QUESTION, max_new_tokens=2)


def test_a_stream_that_is_closed_ends_the_answer(model, tokenizer):
    context = compressed(model, tokenizer, "snapkv")
    chat = context.chat()
    pieces = chat.stream(QUESTION, max_new_tokens=3000)
    next(pieces)
    pieces.close()
    assert chat.turns == 0 and torch.equal(chat.ids, context.ids)
    assert chat.reader.get_seq_length() == context.stats().seen
    free = context.ask(QUESTION, max_new_tokens=5)
    assert chat.ask(QUESTION, max_new_tokens=5) == free


def test_an_error_in_a_stream_reaches_who_reads_it(model, tokenizer, monkeypatch):
    chat = compressed(model, tokenizer, "adakv").chat()
    good = chat.ask(QUESTION, max_new_tokens=4, keep=False)
    layer = model.model.layers[2]
    whole, calls = layer.forward, []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return whole(*args, **options)

    monkeypatch.setattr(layer, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(chat.stream(QUESTION, max_new_tokens=8))
    monkeypatch.undo()
    assert chat.turns == 0 and chat.ask(QUESTION, max_new_tokens=4) == good


def test_a_stream_computes_in_the_autocast_of_its_reader(tokenizer):
    model, modes = new_model(), []
    context = compressed(model, tokenizer, "snapkv")
    handle = model.register_forward_hook(
        lambda *_: modes.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
    )
    with torch.autocast("cpu", torch.float16):
        context.ask(QUESTION, max_new_tokens=3)
        "".join(context.stream(QUESTION, max_new_tokens=3))
    handle.remove()
    assert set(modes) == {(True, torch.float16)}


@pytest.mark.slow
def test_inference_mode_streams_what_it_answers(model, tokenizer):
    """The mode is of one thread, and a stream generates in another."""
    with torch.inference_mode():
        context = compressed(model, tokenizer, "snapkv")
        chat = context.chat()
        for question in QUESTIONS[:2]:
            answer = context.ask(question, max_new_tokens=5)
            assert "".join(context.stream(question, max_new_tokens=5)).strip() == answer
            assert "".join(chat.stream(question, max_new_tokens=5))
    assert chat.turns == 2


def test_copies_have_caches_of_their_own_and_share_the_model(model, tokenizer):
    context = kvfold.compress(model, tokenizer, DOCUMENT, "h2o", 40)
    chat = context.chat()
    session = kvfold.begin_session(model, tokenizer, DOCUMENT, "knorm", 200)
    for one in (chat, session):
        one.ask(QUESTION, max_new_tokens=3)
    for one in (context, chat, session):
        other = copy.deepcopy(one)
        expected = [one.ask(QUESTION, max_new_tokens=3) for _ in range(2)]
        assert [other.ask(QUESTION, max_new_tokens=3) for _ in range(2)] == expected
    other = copy.deepcopy(context)
    assert other.model is model and other.tokenizer is tokenizer
    assert other.cache is not context.cache
