# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused by its name, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.contexts import DOCUMENT, QUESTION
from tests.helpers.serving import CHAT, TEXT, assert_clean, chat, completion, running
from tests.helpers.tokenizers import word_tokenizer

pytestmark = pytest.mark.usefixtures("goes_on")
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
WRONG: list[tuple[str, Any, int, str]] = [
    (CHAT, chat(model="other"), 404, "there is no model 'other'"),
    (CHAT, chat(context_id="none"), 404, "there is no context 'none'"),
    *((CHAT, chat(context_id=name), 400, "context_id") for name in ("../a", "a/b", "a.b", "", "A")),
    *((CHAT, chat(context_id=name), 400, "context_id") for name in ("a\n", "a\0", "é", "a" * 65)),
    (CHAT, chat(n=2), 400, "n: "),
    (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f"}}]),
        400,
        "tools: kvfold serve has no tools: leave the field out",
    ),
    (CHAT, chat(unheard_of=1), 400, "kvfold serve does not know this field: leave it out"),
    (CHAT, chat(chat_template_kwargs={"a": 1}), 400, "no chat template"),
    (CHAT, chat(reasoning_effort="low"), 400, "no chat template"),
    (CHAT, chat(context_id="CONTEXT", chat_template_kwargs={"a": 1}), 400, "other arguments"),
    (CHAT, chat(moderation={"model": "a"}), 400, "moderation: kvfold serve moderates no texts"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        400,
        "messages.0.content.0.type: kvfold serve reads parts of the type text only",
    ),
    (
        CHAT,
        chat(messages=[{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]),
        400,
        "messages.0.tool_calls: kvfold serve has no tools: leave the field out",
    ),
    (CHAT, chat(min_p=2), 400, "min_p: the number must be at most 1"),
    (CHAT, chat(top_k=-2), 400, "top_k: the number must be at least -1"),
    (CHAT, chat(repetition_penalty=0), 400, "repetition_penalty: the number must be at least 0.1"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice: "),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format.type: "),
    (CHAT, chat(logit_bias={"1": 5}), 400, "logit_bias"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs: "),
    (CHAT, chat(logprobs=True), 400, "logprobs: "),
    (CHAT, chat(presence_penalty=0.5), 400, "presence_penalty: "),
    (CHAT, chat(temperature=-1), 400, "temperature: "),
    (CHAT, chat(temperature="1"), 400, "temperature: "),
    (CHAT, chat(top_p=0), 400, "top_p: "),
    (CHAT, chat(seed=2**63), 400, "seed: "),
    (CHAT, chat(max_tokens=0), 400, "max_tokens: "),
    (CHAT, chat(max_completion_tokens=3), 400, "not both"),
    (CHAT, chat(stream_options={}), 400, "stream_options needs stream"),
    (CHAT, chat(stop=["a"] * 17), 400, "stop"),
    (CHAT, chat(messages=[]), 400, "messages: "),
    (CHAT, chat(messages=[{"role": "robot", "content": "a"}]), 400, "messages.0.role: "),
    (CHAT, chat(messages=[{"role": "tool", "content": "a"}]), 400, "for sessions"),
    (CHAT, chat(messages=[{"role": "user", "content": None}]), 400, "messages.0.content"),
    (CHAT, chat(messages=[{"role": "system", "content": "a"}]), 400, "no chat template"),
    (CHAT, chat(messages=TURNS, context_id="CONTEXT"), 400, "after it come a question"),
    (CHAT, chat(messages=[{"role": "user", "content": "the " * 500}]), 400, "takes 400"),
    (CHAT, chat(messages=[{"role": "user", "content": "\ud800"}]), 400, "messages"),
    (CHAT, chat(**{"\ud800": 1}), 400, "lone surrogate"),
    (CHAT, chat(model="\ud800"), 404, "there is no model"),
    (TEXT, completion(prompt="\ud800"), 400, "prompt"),
    (TEXT, completion(stop=["\ud800"]), 400, "stop"),
    (CHAT, chat(context_id="\ud800"), 400, "context_id"),
    (CHAT, {}, 400, "model: "),
    (CHAT, [], 400, "the body is no JSON object"),
    (CHAT, None, 400, "the body is no JSON object"),
    (TEXT, completion(prompt=""), 400, "the prompt is empty"),
    (TEXT, completion(prompt=[]), 400, "the prompt is empty"),
    (TEXT, completion(prompt="", context_id="CONTEXT"), 400, "the prompt is empty"),
    (TEXT, completion(prompt=[12]), 400, "there is no token 12"),
    (TEXT, completion(prompt=[12], context_id="CONTEXT"), 400, "there is no token 12"),
    (TEXT, completion(prompt=[-1]), 400, "prompt"),
    (TEXT, completion(prompt=["a", "b"]), 400, "prompt: "),
    (TEXT, completion(echo=True), 400, "echo: "),
    (TEXT, completion(best_of=2), 400, "best_of: "),
    ("/v1/contexts", {}, 400, "text: "),
    ("/v1/contexts", {"text": ""}, 400, "text: "),
    ("/v1/contexts", {"text": "the " * 500}, 400, "takes 400"),
    ("/v1/contexts", {"text": "a", "id": "../../a"}, 400, "id: "),
    ("/v1/contexts", {"text": "a", "method": "none"}, 400, "unknown method"),
    ("/v1/contexts", {"text": "a", "method": "snapkv:window=no"}, 400, "window"),
    ("/v1/contexts", {"text": "a", "budget": 5}, 400, "raise it to at least"),
    ("/v1/contexts", {"text": "a", "budget": True}, 400, "budget"),
    ("/v1/contexts", {"text": "a", "budget": 10**30}, 400, "budget"),
    ("/v1/contexts", {"text": "a", "budget": "9" * 49}, 400, "more than can be counted"),
    ("/v1/contexts", {"text": "a", "budget": "9" * 40 + "GiB"}, 400, "more than can be counted"),
    ("/v1/contexts", {"text": "a", "budget": "much"}, 400, "cannot read 'much' as a budget"),
    ("/v1/contexts", {"text": "a", "compression_ratio": 0.5}, 400, "budget is the part kept"),
    ("/v1/contexts", {"text": "a", "id": "My Doc"}, 400, "id: an id is 1 to 64 lower-case"),
    (TEXT, completion(prompt=["a", "b"]), 400, "kvfold serve takes one prompt"),
    ("/v1/contexts", {"text": "a", "budget": 1.5}, 400, "for a number of tokens give a whole"),
    ("/v1/contexts", {"text": "a", "budget": "0,2"}, 400, "with a point"),
    ("/v1/contexts", {"text": "a", "budget": [0.2]}, 400, "a budget of 1 numbers"),
    ("/v1/contexts", {"text": "a", "method": "full", "budget": 5}, 400, "takes no budget"),
]


@pytest.mark.slow
@pytest.mark.parametrize("path, body, status, named", WRONG, ids=range(len(WRONG)))
def test_bad_input_is_refused_by_its_name(server, context, path, body, status, named):
    if isinstance(body, dict) and body.get("context_id") == "CONTEXT":
        body = body | {"context_id": context}
    # As ASCII, which can carry halves of characters.
    headers = {"content-type": "application/json"}
    assert_clean(server.http.post(path, content=json.dumps(body), headers=headers), status, named)


@pytest.mark.slow
def test_broken_json_is_refused(server):
    for path in (CHAT, TEXT, "/v1/contexts"):
        for data in (b"", b"{", b"\xff", b"[" * 5000, b'{"a": ' + b"1" * 5000 + b"}", b"nan"):
            headers = {"content-type": "application/json"}
            assert_clean(server.http.post(path, content=data, headers=headers), 400)
    nan = b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}'
    refused = server.http.post(CHAT, content=nan, headers={"content-type": "application/json"})
    assert_clean(refused, 400, "temperature: ")


@pytest.mark.slow
def test_no_refusal_is_in_another_library_s_words(server):
    json_only = {"content-type": "application/json"}
    for path in (CHAT, TEXT, "/v1/contexts", "/v1/sessions"):
        for data, said in (
            (b"{", "the body is no JSON: "),
            (b"[" * 5000, "the body is no JSON: lists and objects are nested too deeply"),
            (b'{"a": ' + b"1" * 5000 + b"}", "the body is no JSON: a number is too long"),
            (b"[1]", "the body is no JSON object"),
        ):
            refused = server.http.post(path, content=data, headers=json_only)
            assert_clean(refused, 400, said)
            assert refused.json()["error"]["param"] is None
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            refused = server.http.post(path, content=b"{}", headers={"content-type": kind})
            assert_clean(refused, 415, "application/json")
    for given in ("abc", "1.5", "", "9" * 5000):
        assert_clean(server.http.get("/v1/contexts", params={"limit": given}), 400, "number is")
    form = {"content-type": "multipart/form-data"}
    assert_clean(server.http.post("/v1/contexts", content=b"a", headers=form), 400, "a boundary")
    files = [("file", ("a", b"the sky")), ("file", ("b", b"the sky"))]
    assert_clean(server.http.post("/v1/contexts", files=files), 400, "one file and at most 10")
    one = {"file": ("a", b"the sky")}
    for fields, said in (
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs: an object is wanted"),
        ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs: an object is wanted"),
        ({"budget": "0,2"}, "with a point"),
    ):
        assert_clean(server.http.post("/v1/contexts", files=one, data=fields), 400, said)


@pytest.mark.slow
def test_paths_that_are_not_there(server):
    for verb, path, status in (
        ("GET", "/v1/contexts/none", 404),
        ("DELETE", "/v1/contexts/none", 404),
        ("GET", "/v1/contexts/A.b", 400),
        ("DELETE", "/v1/contexts/a%2e%2e", 400),
        ("DELETE", "/v1/contexts/%2e%2e%2fetc%2fpasswd", 404),
        ("GET", "/v1/contexts/..%5c..", 400),
        ("GET", "/none", 404),
        ("PUT", "/health", 405),
        ("GET", CHAT, 405),
    ):
        assert_clean(server.http.request(verb, path), status)
    for verb, path in (("GET", "/none"), ("GET", CHAT)):
        told = server.http.request(verb, path).json()["error"]["message"]
        assert "POST /v1/chat/completions" in told and "GET/POST /v1/contexts" in told
        assert told.startswith(f"there is no {verb} {path}: this server has ")
    told = server.http.get("/" + "a" * 3000).json()["error"]["message"]
    assert "POST /v1/chat/completions" in told


def test_a_prompt_and_an_answer_beyond_the_model_s_length(model):
    model.config.max_position_embeddings = 200
    try:
        with running(model, word_tokenizer()) as server:
            name = server.create(DOCUMENT)
            seen = server.engine.contexts.get(name).stats.seen
            room = 200 - seen - 3
            for wanted in (room + 1, 10**6, None):
                whole = server.chat(QUESTION, context_id=name, max_tokens=wanted).json()
                assert whole["usage"]["total_tokens"] == 200
                assert whole["usage"]["completion_tokens"] == room
                assert whole["choices"][0]["finish_reason"] == "length"
            refused = server.chat("the " * (200 - seen), context_id=name)
            assert_clean(refused, 400, "reads and writes 200 tokens")
            assert_clean(server.http.post("/v1/contexts", json={"text": DOCUMENT * 2}), 400, "200")
    finally:
        model.config.max_position_embeddings = 4096
