# SPDX-License-Identifier: Apache-2.0
"""System messages and arguments of chat templates, of contexts and of requests; the log; sizes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

import kvfold
from kvfold.serve.stored import size_of
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.serving import (
    CONTEXTS,
    Brake,
    Running,
    assert_clean,
    cached,
    running,
)
from tests.helpers.tokenizers import word_tokenizer

# Reasoning ends with "go", and earlier answers are shown without theirs.
TEMPLATE = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and 'go' in c %}{% set c = c.split('go')[-1] | trim %}"
    "{% endif %}"
    "{{ '<' + m['role'] + '> ' + c + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{{ reasoning_effort or '' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ 'we go ' }}{% endif %}"
    "{% endif %}"
)
SYSTEM, OFF = "here the sky is green", {"enable_thinking": False}


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = word_tokenizer()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def server(model: Any, tokenizer: Any) -> Iterator[Running]:
    with running(model, tokenizer, answer_tokens=8) as made:
        made.create(DOCUMENT, id="plain")
        made.create(DOCUMENT, id="ruled", system=SYSTEM, chat_template_kwargs=OFF)
        yield made


def conversation(*said: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in said]


def test_a_context_answers_an_equal_system_message_and_refuses_another(server, model, tokenizer):
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40, system=SYSTEM, template=OFF)
    right, asked = context.ask(QUESTION, max_new_tokens=8), ("user", QUESTION)
    assert server.says(QUESTION, context_id="ruled") == right
    for role in ("system", "developer"):
        messages = conversation((role, SYSTEM), asked)
        for given in ({}, {"chat_template_kwargs": OFF}):
            assert server.says(QUESTION, messages=messages, context_id="ruled", **given) == right
    other = conversation(("system", "be brief"), asked)
    refused = server.chat(QUESTION, messages=other, context_id="ruled")
    assert_clean(refused, 400, "another system message")
    refused = server.chat(QUESTION, messages=other, context_id="plain")
    assert_clean(refused, 400, "no system message")
    twice = conversation(("system", SYSTEM), ("system", SYSTEM), asked)
    assert_clean(server.chat(QUESTION, messages=twice, context_id="ruled"), 400, "first")
    on = server.chat(QUESTION, context_id="ruled", chat_template_kwargs={"enable_thinking": True})
    assert_clean(on, 400, "other arguments")


def test_turns_leave_out_what_a_chat_leaves_out(server, model, tokenizer):
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40, system=SYSTEM, template=OFF)
    talk = context.chat()
    talk.add(QUESTION, "the grass go blue")
    messages = conversation(("user", QUESTION), ("assistant", "the grass go blue"), ("user", "we"))
    said = server.says("we", messages=messages, context_id="ruled")
    assert said == talk.ask("we", max_new_tokens=8)


def test_arguments_reach_the_template_without_a_context(server, model, tokenizer):
    for given, arguments in (
        ({"chat_template_kwargs": OFF}, OFF),
        ({"reasoning_effort": "sky"}, {"reasoning_effort": "sky"}),
    ):
        messages = conversation(("user", QUESTION))
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **arguments
        ).input_ids
        out = model.generate(ids, max_new_tokens=8, do_sample=False)
        right = tokenizer.decode(out[0, ids.shape[1] :])
        assert server.says(QUESTION, **given) == right
    wrong = server.chat(QUESTION, chat_template_kwargs={"enable_thinkin": False})
    assert_clean(wrong, 400, "does not read 'enable_thinkin'")
    assert_clean(
        server.chat(QUESTION, chat_template_kwargs={"enable_thinking": "<bos>"}), 400, "spells"
    )


def test_a_prompt_that_begins_with_a_ruled_context_finds_it(server):
    messages = conversation(("system", SYSTEM), ("user", f"{DOCUMENT}\n\n{QUESTION}"))
    found = server.chat("", messages=messages, chat_template_kwargs=OFF)
    seen = server.engine.contexts.get("ruled").stats.seen
    assert cached(found) == seen


def test_an_upload_has_a_system_message_and_arguments(server):
    fields = {"id": "sent", "system": SYSTEM, "chat_template_kwargs": json.dumps(OFF)}
    made = server.http.post(CONTEXTS, files={"file": ("a", DOCUMENT.encode())}, data=fields)
    assert made.status_code == 201, made.text
    assert server.says(QUESTION, context_id="sent") == server.says(QUESTION, context_id="ruled")
    broken = fields | {"id": "b", "chat_template_kwargs": "{"}
    refused = server.http.post(CONTEXTS, files={"file": ("a", b"the sky")}, data=broken)
    assert_clean(refused, 400)
    spelled = server.http.post(CONTEXTS, json={"text": DOCUMENT, "system": "<bos>"})
    assert_clean(spelled, 400, "spells a control token")


def test_a_session_has_no_arguments(server):
    server.http.post("/v1/sessions", json={"text": "the sky", "id": "s"}).raise_for_status()
    for given in ({"chat_template_kwargs": OFF}, {"reasoning_effort": "low"}):
        assert_clean(server.chat(QUESTION, session_id="s", **given), 400, "no arguments")


@pytest.mark.slow
def test_a_line_of_the_log_tells_no_text(server, caplog):
    caplog.set_level(logging.INFO, "kvfold")
    server.says(QUESTION, context_id="ruled")
    server.http.request("SECRET", "/private")
    lines = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("POST /v1/chat/completions 200 ") for line in lines)
    assert any(line.startswith("other none 40") for line in lines)
    told = "\n".join(lines)
    assert not any(word in told for word in (QUESTION, "SECRET", "private", "tiny"))


@pytest.mark.parametrize(("method", "budget"), [("knorm", 100), ("knorm", 0.7), ("full", None)])
def test_a_context_beyond_the_memory_is_refused_before_it_is_read(model, tokenizer, method, budget):
    made = kvfold.compress(model, tokenizer, DOCUMENT, method, budget)
    body = {"text": DOCUMENT, "method": method} | ({} if budget is None else {"budget": budget})
    with running(model, tokenizer, memory=int(0.5 * size_of(made))) as server:
        brake = Brake(model)
        try:
            assert_clean(server.http.post(CONTEXTS, json=body), 413, "choose a smaller budget")
            assert brake.forwards == 0
        finally:
            brake.hook.remove()
    with running(model, tokenizer, memory=size_of(made)) as server:
        assert server.http.post(CONTEXTS, json=body).status_code == 201


def test_a_repetition_penalty_sees_the_context(model, tokenizer):
    with running(model, tokenizer, method="full", budget=None, answer_tokens=8) as server:
        document = "sky blue " * 30  # other words are not in it
        server.create(document, id="a")
        messages = conversation(("user", f"{document}\n\n{QUESTION}"))
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=8, do_sample=False, repetition_penalty=1.7)
        right = tokenizer.decode(out[0, ids.shape[1] :])
        said = server.says(QUESTION, context_id="a", repetition_penalty=1.7)
        assert said == right != server.says(QUESTION, context_id="a")
        best = server.says(QUESTION, context_id="a")
        for narrow in ({"top_k": 1}, {"min_p": 1.0}):
            said = server.chat(QUESTION, context_id="a", temperature=1.5, seed=3, **narrow)
            assert said.json()["choices"][0]["message"]["content"] == best


@pytest.mark.parametrize("budget", [[0.9, 0.3, 0.5, 0.7], "0.9,0.3,0.5,0.7", [100, 20, 30, 4000]])
def test_a_context_has_a_budget_for_each_layer(model, tokenizer, budget):
    context = kvfold.compress(model, tokenizer, DOCUMENT, "knorm:skip_layers=none", budget)
    right = context.ask(QUESTION, max_new_tokens=8)
    small = {"memory": size_of(context)}  # it fits, though one layer's budget alone would not
    with running(model, tokenizer, method="knorm:skip_layers=none", **small) as server:
        made = server.create(DOCUMENT, budget=budget)
        assert server.engine.contexts.get(made).stats.kept == context.stats().kept
        assert server.says(QUESTION, context_id=made) == right
    if isinstance(budget, str):  # the server's own
        with running(model, tokenizer, method="knorm:skip_layers=none", budget=budget) as server:
            made = server.create(DOCUMENT)
            assert server.engine.contexts.get(made).stats.kept == context.stats().kept
