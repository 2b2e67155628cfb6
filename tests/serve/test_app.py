# SPDX-License-Identifier: Apache-2.0
"""The endpoint answers as the library does, and as OpenAI's clients expect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvfold
from kvfold.serve.routes.answers import StrippedText
from tests.helpers.chats import QUESTIONS, chat_tokenizer
from tests.helpers.contexts import DOCUMENT, KINDS, KIVI, QUESTION
from tests.helpers.serving import NAME, Running, alone_until, running, until


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


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("spec", ["snapkv", "adakv", KIVI, "streaming_llm", "kvzip", "full"])
def test_an_answer_is_the_one_of_the_library(server, model, tokenizer, spec):
    budget = KINDS[spec][0]
    name = server.create(DOCUMENT, method=spec, budget=budget)
    lone = kvfold.compress(model, tokenizer, DOCUMENT, spec, budget)
    answers = [server.says(q, context_id=name) for q in QUESTIONS[:4]]
    assert answers == [lone.ask(q, max_new_tokens=8) for q in QUESTIONS[:4]]
    assert len(set(answers)) > 1
    server.http.delete(f"/v1/contexts/{name}")


def test_turns_are_read_as_a_chat_does(server, context, alone):
    chat = alone.chat()
    first = chat.ask(QUESTIONS[1], max_new_tokens=5)
    second = chat.ask(QUESTIONS[2], max_new_tokens=5)
    messages = [
        {"role": "user", "content": QUESTIONS[1]},
        {"role": "assistant", "content": [{"type": "text", "text": first}]},
        {"role": "user", "content": QUESTIONS[2]},
    ]
    options = {"messages": messages, "context_id": context, "max_tokens": 5}
    assert server.says("", **options) == second


def test_without_a_context_it_is_the_model_s_own_answer(server, model, tokenizer):
    messages = [
        {"role": "system", "content": "we go here"},
        {"role": "user", "content": QUESTION},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=8, do_sample=False)
    expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert server.says("", messages=messages) == expected
    for prompt in (text, ids[0].tolist(), [text], [ids[0].tolist()]):
        made = server.openai.completions.create(
            model=NAME, prompt=prompt, max_tokens=8, temperature=0
        )
        assert made.choices[0].text == expected and made.usage.prompt_tokens == ids.shape[1]
    assert server.openai.completions.create(model=NAME, prompt=text).usage.completion_tokens == 16


def test_a_completion_goes_on_after_a_context(server, context, alone, tokenizer):
    made = server.openai.completions.create(
        model=NAME,
        prompt=f"\n\n{QUESTION}{alone.frame.after}",
        max_tokens=8,
        temperature=0,
        extra_body={"context_id": context},
    )
    assert made.choices[0].text.strip() == alone.ask(QUESTION, max_new_tokens=8)
    assert made.usage.prompt_tokens_details.cached_tokens == alone.ids.shape[1]


def test_answers_end_at_their_length_at_a_stop_string_or_by_themselves(
    server, context, alone, model, tokenizer
):
    free = alone.ask(QUESTION, max_new_tokens=8).split()

    def ended(**options: Any) -> tuple[str, str, int]:
        body = server.chat(QUESTION, context_id=context, **options).json()
        choice = body["choices"][0]
        return (
            choice["message"]["content"],
            choice["finish_reason"],
            body["usage"]["completion_tokens"],
        )

    assert ended() == (" ".join(free), "length", 8)
    assert ended(max_tokens=None, max_completion_tokens=3) == (" ".join(free[:3]), "length", 3)
    assert ended(stop=free[2])[:2] == alone_until(free, free[2])
    assert ended(stop=["nothing", f"{free[2]} {free[3]}"])[1] == "stop"
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(free[4])]
    try:
        text, reason, tokens = ended()
        assert (reason, tokens) == ("stop", free.index(free[4]) + 1)
        assert text == " ".join(free[:tokens])
    finally:
        model.generation_config.eos_token_id = None


def test_white_space_is_left_out_at_both_ends_only():
    for pieces in (["  a ", " ", " b\n", "\n"], [" ", "\n"], ["a"], [" a b "], ["", "a", " ", ""]):
        strip = StrippedText()
        assert "".join(map(strip.of, pieces)) == "".join(pieces).strip()


def test_contexts_come_and_go(server, alone):
    before = server.engine.contexts.nbytes
    made = server.http.post("/v1/contexts", json={"text": DOCUMENT, "id": "mine", "budget": "50%"})
    stats = kvfold.compress(alone.model, alone.tokenizer, DOCUMENT, "snapkv", 0.5).stats()
    told = made.json()
    assert told["id"] == "mine" and told["tokens"] == stats.seen
    assert told["kept"] == stats.kept_fraction and told["bytes_full"] == stats.nbytes_full
    assert told["kept_per_layer"] == [rows[0] for rows in stats.kept]
    assert told["bytes"] == stats.nbytes + stats.id_bytes + alone.ids.nbytes
    assert server.engine.contexts.nbytes == before + told["bytes"]
    assert server.http.get("/v1/contexts/mine").json() == told
    listed = server.http.get("/v1/contexts").json()["data"]
    assert [one["id"] for one in listed] == ["mine"]
    again = server.http.post("/v1/contexts", json={"text": DOCUMENT, "id": "mine"})
    assert again.status_code == 409
    assert server.http.delete("/v1/contexts/mine").json()["deleted"]
    assert server.http.delete("/v1/contexts/mine").status_code == 404
    assert server.engine.contexts.nbytes == before


def test_a_file_is_uploaded(server, alone):
    data = {"method": "snapkv", "budget": "40", "id": "file"}
    file = {"file": ("a.txt", DOCUMENT.encode())}
    made = server.http.post("/v1/contexts", files=file, data=data)
    assert made.status_code == 201, made.text
    assert server.says(QUESTION, context_id="file") == alone.ask(QUESTION, max_new_tokens=8)
    server.http.delete("/v1/contexts/file")
    for wrong, status in (
        ({"files": {"file": ("a.txt", b"\xff\xfe")}}, 400),
        ({"files": {"other": ("a.txt", b"a")}}, 400),
        ({"files": {"file": ("a.txt", b"")}}, 400),
        ({"files": file, "data": {"id": "../a"}}, 400),
        ({"files": file, "data": {"more": "a"}}, 400),
        ({"files": file, "data": {"budget": "much"}}, 400),
        ({"content": DOCUMENT.encode(), "headers": {"content-type": "text/plain"}}, 415),
        ({"content": b"--", "headers": {"content-type": "multipart/form-data"}}, 400),
    ):
        refused = server.http.post("/v1/contexts", **wrong)
        assert refused.status_code == status, (wrong, refused.text)
        assert refused.json()["error"]["message"]


@pytest.mark.slow
def test_the_byte_order_mark_of_a_file_is_no_text(server, alone):
    file = {"file": ("a.txt", DOCUMENT.encode("utf-8-sig"))}
    made = server.http.post("/v1/contexts", files=file)
    assert made.status_code == 201, made.text
    held = server.engine.contexts.get(made.json()["id"]).value
    assert torch.equal(held.ids, alone.ids)
    server.http.delete(f"/v1/contexts/{made.json()['id']}")


@pytest.mark.slow
def test_what_is_counted(server, context):
    prompt = server.metric('kvfold_tokens_total{kind="prompt"}')
    generated = server.metric('kvfold_tokens_total{kind="generated"}')
    usage = server.chat(QUESTION, context_id=context).json()["usage"]
    assert server.metric('kvfold_tokens_total{kind="prompt"}') == prompt + usage["prompt_tokens"]
    assert server.metric('kvfold_tokens_total{kind="generated"}') == generated + 8
    held = server.engine.contexts.get(context)
    assert server.metric('kvfold_contexts{place="memory"}') == 1
    assert server.metric("kvfold_context_bytes") == held.size
    assert server.metric("kvfold_context_tokens") == held.stats.seen
    assert server.metric("kvfold_context_tokens_kept") == pytest.approx(40)
    assert server.metric("kvfold_queue_depth") == 0
    until(lambda: server.metric("kvfold_running") == 0)
    route = 'kvfold_requests_total{route="/v1/chat/completions",status="200"}'
    before = server.metric(route)
    server.chat(QUESTION, context_id=context)
    assert server.metric(route) == before + 1


def test_cold_bytes_are_told_beside_those_in_memory(server):
    cold = 'kvfold_{}_cold_bytes{{place="{}"}}'.format
    made = server.create(DOCUMENT, method="recall:residual=8", budget=None)
    told = server.http.get(f"/v1/contexts/{made}").json()
    assert told["cold"]["filed"] == server.metric(cold("context", "disk")) > told["bytes"]
    assert told["cold"]["host"] == server.metric(cold("context", "memory")) == 0
    server.http.delete(f"/v1/contexts/{made}")
    began = {"text": DOCUMENT, "method": "snapkv + recall:residual=8", "budget": 400}
    session = server.http.post("/v1/sessions", json=began).json()
    assert session["cold"]["host"] == server.metric(cold("session", "memory")) < session["bytes"]
    assert session["cold"]["filed"] == server.metric(cold("session", "disk")) == 0
    server.http.delete(f"/v1/sessions/{session['id']}")


def test_models(server):
    assert [model.id for model in server.openai.models.list()] == [NAME]
    assert server.openai.models.retrieve(NAME).id == NAME
    assert server.http.get("/v1/models/other/model").status_code == 404
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready"}
