# SPDX-License-Identifier: Apache-2.0
"""Streams are server-sent events; a failure in mid-stream is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import kvfold
from tests.helpers.chats import chat_tokenizer
from tests.helpers.contexts import DOCUMENT, QUESTION
from tests.helpers.serving import NAME, Running, running


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


def test_the_openai_client_streams(server, context, alone):
    options: Any = {
        "model": NAME,
        "temperature": 0,
        "max_tokens": 8,
        "stream": True,
        "extra_body": {"context_id": context},
    }
    chunks = list(
        server.openai.chat.completions.create(
            messages=[{"role": "user", "content": QUESTION}],
            stream_options={"include_usage": True},
            **options,
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == alone.ask(QUESTION, max_new_tokens=8)
    assert len(chunks) > 6 and len({c.id for c in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == alone.ids.shape[1]
    pieces = list(server.openai.completions.create(prompt=QUESTION, **options))
    whole = server.openai.completions.create(prompt=QUESTION, **options | {"stream": False})
    assert "".join(p.choices[0].text for p in pieces) == whole.choices[0].text
    assert pieces[-1].choices[0].finish_reason == "length"


def test_a_stream_is_server_sent_events(server, context):
    answered = server.chat(QUESTION, context_id=context, stream=True)
    assert answered.headers["content-type"].startswith("text/event-stream")
    *lines, done, end = answered.text.split("\n\n")
    assert done == "data: [DONE]" and end == ""
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert all("usage" not in event for event in events)
    assert events[-1]["choices"][0] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "length",
    }  # fmt: skip


def test_a_failure_in_mid_stream_is_told(server, context, monkeypatch):
    whole = server.engine.answer

    def fails_at_the_end(request: Any, put: Any, cancelled: Any) -> None:
        whole(request, put, cancelled)
        raise RuntimeError("secret")

    monkeypatch.setattr(server.engine, "answer", fails_at_the_end)
    text = server.chat(QUESTION, context_id=context, stream=True).text
    assert "server_error" in text.split("\n\n")[-2] and "secret" not in text
    assert "[DONE]" not in text
    answered = server.chat(QUESTION, context_id=context)
    assert answered.status_code == 500 and "secret" not in answered.text
    assert answered.json()["error"]["type"] == "server_error"
    # The same connection goes on.
    stream = answered.extensions["network_stream"]
    assert server.http.get("/health").extensions["network_stream"] is stream

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(server.engine, "answer", out_of_memory)
    answered = server.chat(QUESTION, context_id=context)
    assert answered.status_code == 503 and answered.headers["retry-after"]

    def out_of_memory_half_way(request: Any, put: Any, cancelled: Any) -> None:
        whole(request, put, cancelled)
        out_of_memory()

    monkeypatch.setattr(server.engine, "answer", out_of_memory_half_way)
    text = server.chat(QUESTION, context_id=context, stream=True).text
    assert "out_of_memory" in text.split("\n\n")[-2] and "[DONE]" not in text
