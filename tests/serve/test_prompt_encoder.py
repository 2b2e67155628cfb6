# SPDX-License-Identifier: Apache-2.0
"""Requests that begin with a context that is held use it."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvfold
from tests.helpers.chats import QUESTIONS, chat_tokenizer
from tests.helpers.contexts import DOCUMENT, QUESTION
from tests.helpers.serving import NAME, Running, cached, running
from tests.helpers.tokenizers import SPECIAL, WORDS

OTHER = " ".join(reversed(DOCUMENT.split()))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer()


@pytest.fixture(scope="module")
def server(model: Any, tokenizer: Any) -> Any:
    with running(model, tokenizer, workers=2) as made:
        yield made


@pytest.fixture
def context(server: Running) -> Any:
    name = server.create(DOCUMENT)
    yield name
    server.http.delete(f"/v1/contexts/{name}")


@pytest.fixture(scope="module")
def alone(model: Any, tokenizer: Any) -> kvfold.Context:
    return kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)


def test_a_request_that_begins_with_a_context_uses_it(server, context, alone, tokenizer):
    hits = server.metric('kvfold_prefix_cache_total{result="hit"}')
    misses = server.metric('kvfold_prefix_cache_total{result="miss"}')
    answered = server.chat(f"{DOCUMENT}\n\n{QUESTION}")
    assert cached(answered) == alone.ids.shape[1]
    expected = alone.ask(QUESTION, max_new_tokens=8)
    assert answered.json()["choices"][0]["message"]["content"] == expected
    assert cached(server.chat(f"{OTHER}\n\n{QUESTION}")) == 0
    without = server.chat(f"{DOCUMENT}\n\n{QUESTION}", prefix_cache=False)
    assert cached(without) == 0
    assert without.json()["choices"][0]["message"]["content"] != expected
    assert server.metric('kvfold_prefix_cache_total{result="hit"}') == hits + 1
    assert server.metric('kvfold_prefix_cache_total{result="miss"}') == misses + 1
    text = f"{alone.frame.before}{DOCUMENT} {QUESTION}"
    body = {"model": NAME, "prompt": tokenizer(text, add_special_tokens=False).input_ids}
    assert cached(server.http.post("/v1/completions", json=body)) == alone.ids.shape[1]


@pytest.mark.slow
def test_the_longest_and_newest_context_is_used(server, context):
    longer = server.create(f"{DOCUMENT} {DOCUMENT}")
    twin = server.create(f"{DOCUMENT} {DOCUMENT}", budget=60)
    tokens = len(server.engine.tokenizer(DOCUMENT).input_ids)
    prompt = f"{DOCUMENT} {DOCUMENT} {QUESTION}"
    assert cached(server.chat(prompt)) > 2 * tokens - 1
    for name in (twin, longer):
        named = server.says(QUESTION, context_id=name)
        assert server.says(prompt) == named
        server.http.delete(f"/v1/contexts/{name}")
    assert tokens <= cached(server.chat(prompt)) < 2 * tokens


def test_a_blank_line_that_joins_the_last_token_does_not_matter(model):
    joined = f"{WORDS[0]}\n\n"
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS[:-1], joined])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+(\n\n)?|<\w+>"), "removed", invert=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>"
    )
    text = f"{DOCUMENT} {WORDS[0]}"
    lone = kvfold.compress(model, tokenizer, text, "snapkv", 40)
    ids = tokenizer(f"{text}\n\n{QUESTION}", add_special_tokens=False).input_ids
    assert ids[lone.ids.shape[1] - 2] == vocabulary[joined]
    with running(model, tokenizer) as server:
        server.create(text)
        answered = server.chat(f"{text}\n\n{QUESTION}")
        assert cached(answered) == lone.ids.shape[1]
        said = answered.json()["choices"][0]["message"]["content"]
        assert said == lone.ask(QUESTION, max_new_tokens=8)
        assert cached(server.chat(f"{text}{QUESTION}")) == 0


def test_a_question_longer_than_a_piece_is_read_in_pieces(model, tokenizer, alone):
    with running(model, tokenizer, prefill_chunk=16) as server:
        name = server.create(DOCUMENT, method="full")
        lone = kvfold.compress(model, tokenizer, DOCUMENT, "full")
        question = " ".join(QUESTIONS)
        assert len(question.split()) > 32
        assert server.says(question, context_id=name) == lone.ask(question, max_new_tokens=8)
