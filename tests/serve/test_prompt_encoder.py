# SPDX-License-Identifier: Apache-2.0
"""Requests that begin with a context that is held use it."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvfold
from kvfold.hf.chat_template import PromptFrame
from kvfold.serve.errors import ApiError
from kvfold.serve.prompt_encoder import PromptEncoder
from kvfold.serve.request_schemas import RequestMessage
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


# Roles of Qwen2.5's template, and of one that strips the reasoning of answers, as Qwen3's does.
BRANCHES = (
    "{% for m in messages %}{% if m.role == 'system' or m.role == 'user' %}"
    "{{ '<' + m.role + '> ' + m.content | trim + ' </s> ' }}{% elif m.role == 'assistant' %}"
    "{{ '<assistant> ' + m.content.split('</think>')[-1] + ' </s> ' }}{% endif %}{% endfor %}"
)
NO_SYSTEM = BRANCHES.replace("m.role == 'system' or ", "")
# Mistral's place of a system message: before the last one of the user.
MOVED = (
    "{% for m in messages if m.role != 'system' %}"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content + ' ' }}{% endif %}"
    "{{ m.content + ' </s> ' }}{% endfor %}"
)


def prompt_of(template: str, *turns: tuple[str, str]) -> str:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    encoder = PromptEncoder(tokenizer, PromptFrame.of(tokenizer), len(tokenizer))
    asked = [RequestMessage.model_validate({"role": r, "content": text}) for r, text in turns]
    return "".join(encoder.conversation(asked))


USER = ("user", QUESTION)


@pytest.mark.parametrize("template", [BRANCHES, MOVED], ids=["qwen", "mistral"])
def test_a_developer_s_message_is_a_system_message(template):
    said = prompt_of(template, ("developer", " we go "), USER)
    assert said == prompt_of(template, ("system", " we go "), USER) and "we go" in said


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_message_that_the_template_drops_is_refused_by_its_role(role):
    # Its text is in another message, too.
    for turns in (((role, "the"), USER), (USER, ("assistant", "the"), (role, "sky"), USER)):
        with pytest.raises(
            ApiError, match=f"drops messages of role '{role}': leave out"
        ) as refused:
            prompt_of(NO_SYSTEM, *turns)
        assert refused.value.status_code == 400 and refused.value.param == "messages"
    assert prompt_of(NO_SYSTEM, (role, " "), USER) == prompt_of(NO_SYSTEM, USER)


def test_what_a_template_shortens_or_moves_is_not_dropped():
    answer = ("assistant", "<think>sky</think>blue")
    said = prompt_of(BRANCHES, ("system", " here "), USER, answer, USER)
    assert "sky" not in said.replace(QUESTION, "") and "<assistant> blue" in said
    turns = [turn for i in range(12) for turn in (("user", f"{i}"), ("assistant", f"{i}"))]
    assert prompt_of(MOVED, ("system", "1"), *turns, USER).count("</s>") == 25


def test_messages_that_the_template_refuses_are_a_client_s_error():
    gemma = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(ApiError, match="refuses messages of system, user: no system") as refused:
        prompt_of(gemma + BRANCHES, ("system", "we go"), USER)
    assert refused.value.status_code == 400 and refused.value.param == "messages"
