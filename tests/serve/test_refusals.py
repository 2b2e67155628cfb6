# SPDX-License-Identifier: Apache-2.0
"""Bad input, full queues, clients that hang up, and the end: the server goes on, or stops well."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest

import kvfold
from tests.helpers.commands import refused
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.serving import NAME, Running, braked, running, until
from tests.helpers.tokenizers import word_tokenizer

BODY_LIMIT = 20_000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Running]:
    limits = {"body": BODY_LIMIT, "context_tokens": 400, "answer_tokens": 3000, "queue": 1}
    with running(model, word_tokenizer(), **limits) as made:
        yield made


@pytest.fixture(scope="module")
def context(server: Running) -> str:
    return server.create(DOCUMENT)


@pytest.fixture(autouse=True)
def goes_on(server: Running, context: str) -> Iterator[None]:
    """After each test the server answers as before, and nobody is left."""
    yield
    until(lambda: server.engine.workers.admitted == 0)
    held = server.engine.contexts.get(context)
    until(lambda: held.readers == 0)
    assert server.says(QUESTION, context_id=context)


def chat(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"model": NAME, "messages": messages, "max_tokens": 2} | changes


def completion(**changes: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": QUESTION, "max_tokens": 2} | changes


def assert_clean(answered: httpx.Response, status: int, named: str = "") -> None:
    assert answered.status_code == status, answered.text
    error = answered.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert named in error["message"]
    assert "Traceback" not in answered.text and 'File "' not in answered.text


# --- bad input -----------------------------------------------------------------------------------

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
WRONG: list[tuple[str, Any, int, str]] = [
    (CHAT, chat(model="other"), 404, "there is no model 'other'"),
    (CHAT, chat(context_id="none"), 404, "there is no context 'none'"),
    *((CHAT, chat(context_id=name), 400, "context_id") for name in ("../a", "a/b", "a.b", "", "A")),
    *((CHAT, chat(context_id=name), 400, "context_id") for name in ("a\n", "a\0", "é", "a" * 65)),
    (CHAT, chat(n=2), 400, "n: "),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
    (CHAT, chat(tool_choice="required"), 400, "tool_choice: "),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "response_format.type: "),
    (CHAT, chat(logit_bias={"1": 5}), 400, "logit_bias"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs: "),
    (CHAT, chat(store=True), 400, "store: "),
    (CHAT, chat(top_k=5), 400, "top_k: "),
    (CHAT, chat(logprobs=True), 400, "logprobs: "),
    (CHAT, chat(presence_penalty=0.5), 400, "presence_penalty: "),
    (CHAT, chat(temperature=-1), 400, "temperature: "),
    (CHAT, chat(temperature="1"), 400, "temperature: "),
    (CHAT, chat(top_p=0), 400, "top_p: "),
    (CHAT, chat(seed=2**63), 400, "seed: "),
    (CHAT, chat(max_tokens=0), 400, "max_tokens: "),
    (CHAT, chat(max_tokens=3001), 400, "at most 3000 tokens"),
    (CHAT, chat(max_completion_tokens=3), 400, "not both"),
    (CHAT, chat(stream_options={}), 400, "stream_options needs stream"),
    (CHAT, chat(stop=["a"] * 17), 400, "stop"),
    (CHAT, chat(messages=[]), 400, "messages: "),
    (CHAT, chat(messages=[{"role": "tool", "content": "a"}]), 400, "messages.0.role: "),
    (CHAT, chat(messages=[{"role": "user", "content": None}]), 400, "messages.0.content"),
    (CHAT, chat(messages=[{"role": "system", "content": "a"}]), 400, "no chat template"),
    (CHAT, chat(messages=TURNS, context_id="CONTEXT"), 400, "after it come a question"),
    (CHAT, chat(messages=[{"role": "user", "content": "the " * 500}]), 400, "takes 400"),
    (CHAT, chat(messages=[{"role": "user", "content": "\ud800"}]), 400, "messages"),
    (CHAT, chat(**{"\ud800": 1}), 400, "unicode"),
    (CHAT, chat(model="\ud800"), 404, "there is no model"),
    (TEXT, completion(prompt="\ud800"), 400, "prompt"),
    (TEXT, completion(stop=["\ud800"]), 400, "stop"),
    (CHAT, chat(context_id="\ud800"), 400, "context_id"),
    (CHAT, {}, 400, "model: "),
    (CHAT, [], 400, ""),
    (CHAT, None, 400, ""),
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
    ("/v1/contexts", {"text": "a", "budget": "much"}, 400, "cannot read 'much'"),
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


def test_a_prompt_and_an_answer_beyond_the_model_s_length(model):
    model.config.max_position_embeddings = 200
    try:
        with running(model, word_tokenizer()) as server:
            name = server.create(DOCUMENT)
            seen = server.engine.contexts.get(name).stats.seen
            room = 200 - seen - 3
            refused = server.chat(QUESTION, context_id=name, max_tokens=room + 1)
            assert_clean(refused, 400, "reads and writes 200 tokens")
            whole = server.chat(QUESTION, context_id=name, max_tokens=None).json()
            assert whole["usage"]["total_tokens"] == 200
            assert_clean(server.http.post("/v1/contexts", json={"text": DOCUMENT * 2}), 400, "200")
    finally:
        model.config.max_position_embeddings = 4096


# --- keys, bodies --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_key_is_asked_for(model):
    with running(model, word_tokenizer(), api_key="right") as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer"},
            {"Authorization": "Basic right"},
            {"Authorization": "Bearer ri"},
            {"Authorization": b"Bearer \xff"},
        ):
            for path in ("/v1/models", "/v1/none"):
                answered = server.http.get(path, headers=headers)
                assert_clean(answered, 401, "API key")
                assert answered.headers["www-authenticate"] == "Bearer"
            assert_clean(server.http.post(CHAT, content=b"{", headers=headers), 401)
        assert server.http.get("/health").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.openai.models.list()
        assert server.openai.with_options(api_key="right").models.list().data


def raw(server: Running, *parts: bytes) -> bytes:
    """What the server answers to bytes on a connection, which either side may close first."""
    answer = b""
    with socket.create_connection(("127.0.0.1", server.port), 10) as made:
        with suppress(OSError):
            for part in parts:
                made.sendall(part)
            made.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while more := made.recv(65536):
                answer += more
    return answer


def head(path: str, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: a", "Content-Type: application/json", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_an_oversized_body_is_refused_whatever_its_length_says(server):
    large = b'{"text": "' + b"a" * BODY_LIMIT + b'"}'
    for path in ("/v1/contexts", CHAT):
        assert_clean(
            server.http.post(path, content=large, headers={"content-type": "application/json"}),
            413,
            f"larger than the {BODY_LIMIT} bytes",
        )
        pieces = [large[i : i + 1000] for i in range(0, len(large), 1000)]
        chunked = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]
        chunks = [head(path, "Transfer-Encoding: chunked"), *chunked, b"0\r\n\r\n"]
        assert raw(server, *chunks).startswith(b"HTTP/1.1 413")
    upload = {"file": ("a.txt", large)}
    assert_clean(server.http.post("/v1/contexts", files=upload), 413)
    assert raw(server, head(CHAT, f"Content-Length: {10**15}")).startswith(b"HTTP/1.1 413")


def test_a_length_that_is_not_true_harms_nobody(server):
    for length, body in ((5, b'{"model": "tiny"}'), (10, b"{"), (-5, b"{}"), ("a", b"{}")):
        answer = raw(server, head(CHAT, f"Content-Length: {length}"), body)
        assert b" 200 " not in answer and b" 500 " not in answer and b"Traceback" not in answer


# --- the queue, and clients that hang up ---------------------------------------------------------


def test_a_full_queue_says_when_to_come_again(server, model, context):
    with braked(model) as brake, ThreadPoolExecutor(3) as pool:
        first = pool.submit(server.chat, QUESTION, context_id=context)
        until(lambda: server.engine.workers.running == 1)
        second = pool.submit(server.chat, QUESTION, context_id=context)
        until(lambda: server.engine.workers.waiting == 1)
        assert server.metric("kvfold_queue_depth") == 1 and server.metric("kvfold_running") == 1
        for path, body in ((CHAT, chat()), ("/v1/contexts", {"text": DOCUMENT})):
            full = server.http.post(path, json=body)
            assert_clean(full, 429, "1 requests are waiting")
            assert int(full.headers["retry-after"]) >= 1
        with pytest.raises(openai.RateLimitError):
            server.openai.completions.create(model=NAME, prompt=QUESTION)
        assert server.http.get("/v1/contexts").status_code == 200
        brake.go.set()
        assert first.result().text and first.result().status_code == 200
        assert second.result().status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("path, body", [(CHAT, chat()), ("/v1/contexts", {"text": DOCUMENT})])
def test_nobody_has_an_answer_before_the_place_is_free(model, path, body):
    with (
        running(model, word_tokenizer(), queue=0) as server,
        braked(model) as brake,
        ThreadPoolExecutor(1) as pool,
    ):
        workers = server.engine.workers
        asking = pool.submit(server.http.post, path, json=body)
        until(lambda: brake.forwards == 1)
        with workers._lock:
            brake.go.set()
            with pytest.raises(TimeoutError):
                asking.result(timeout=1)
        assert asking.result().is_success
        assert workers.admitted == 0


def test_who_hangs_up_in_mid_stream_is_not_generated_for(server, model, context):
    body = chat(context_id=context, stream=True, max_tokens=3000)
    with braked(model) as brake:
        brake.go.set()
        with httpx.stream("POST", f"{server.url}{CHAT}", json=body, timeout=60) as answered:
            for line in answered.iter_lines():
                if '"content": "' in line and brake.forwards > 3:
                    break
        until(lambda: server.engine.workers.admitted == 0)
        assert brake.forwards < 1500
        assert server.engine.contexts.get(context).readers == 0


def test_tokens_for_who_hung_up_are_counted(server):
    assert server.metric("kvfold_abandoned_tokens_total") > 0


def test_who_hangs_up_before_the_answer_frees_the_place(server, model, context):
    with braked(model) as brake:
        for stream in (False, True):
            with socket.create_connection(("127.0.0.1", server.port)) as running_one:
                send(running_one, chat(context_id=context, max_tokens=3000, stream=stream))
                until(lambda: server.engine.workers.running == 1)
                with socket.create_connection(("127.0.0.1", server.port)) as queued:
                    send(queued, chat(context_id=context, max_tokens=3000, stream=stream))
                    until(lambda: server.engine.workers.waiting == 1)
                # The place in the queue is free before anything was computed for it.
                until(lambda: server.engine.workers.waiting == 0)
                assert brake.forwards == 1
            brake.go.set()
            until(lambda: server.engine.workers.admitted == 0)
            assert brake.forwards < 1500
            brake.forwards = 0
            brake.go.clear()


def send(connection: socket.socket, body: dict[str, Any]) -> None:
    request = httpx.Request("POST", f"http://a{CHAT}", json=body)
    connection.sendall(head(CHAT, f"Content-Length: {len(request.content)}") + request.content)


def test_a_context_that_nobody_waits_for_is_not_made(model):
    with (
        running(model, word_tokenizer(), prefill_chunk=10) as server,
        braked(model) as brake,
    ):
        workers = server.engine.workers
        with socket.create_connection(("127.0.0.1", server.port)) as made:
            request = httpx.Request("POST", "http://a", json={"text": DOCUMENT, "id": "lost"})
            length = f"Content-Length: {len(request.content)}"
            made.sendall(head("/v1/contexts", length) + request.content)
            until(lambda: brake.forwards == 1)
        until(lambda: any(cancelled.is_set() for cancelled in workers._cancels))
        brake.go.set()
        until(lambda: workers.admitted == 0)
        assert brake.forwards == 1
        assert server.http.get("/v1/contexts").json()["data"] == []
        assert server.engine.contexts.nbytes == 0


def test_a_context_deleted_while_it_is_read_goes_on_for_its_reader(server, model):
    before = server.engine.contexts.nbytes
    name = server.create(DOCUMENT, id="short-lived")
    alone = server.says(QUESTION, context_id=name)
    with braked(model) as brake, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(server.says, QUESTION, context_id=name)
        until(lambda: brake.forwards == 1)
        assert server.http.get(f"/v1/contexts/{name}").json()["readers"] == 1
        assert server.http.delete(f"/v1/contexts/{name}").status_code == 200
        assert server.http.get(f"/v1/contexts/{name}").status_code == 404
        assert server.http.get("/v1/contexts").json()["data"][-1]["id"] != name
        assert server.engine.contexts.nbytes > before
        brake.go.set()
        assert reading.result() == alone
    until(lambda: server.engine.contexts.nbytes == before)
    assert server.chat(QUESTION, context_id=name).status_code == 404


# --- the end -------------------------------------------------------------------------------------


def test_a_stop_lets_what_was_accepted_end(model):
    with running(model, word_tokenizer()) as server:
        alone = server.says(QUESTION)
        folder = server.engine.contexts.folder.path
        server.http.get("/health")
        with braked(model) as brake, ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(server.says, QUESTION) for _ in range(2)]
            until(lambda: server.engine.workers.admitted == 2)
            server.server.stop()
            for refused in (server.http.get("/ready"), server.http.post(CHAT, json=chat())):
                assert_clean(refused, 503, "stopping")
                assert refused.headers["retry-after"]
            assert server.http.get("/health").status_code == 200 and folder.exists()
            brake.go.set()
            assert [answer.result() for answer in answers] == [alone] * 2
        until(lambda: not folder.exists())


def test_the_grace_ends(model):
    with (
        running(model, word_tokenizer(), grace=0.1, answer_tokens=3000) as server,
        braked(model) as brake,
        ThreadPoolExecutor(1) as pool,
    ):
        brake.go.set()
        running_one = pool.submit(server.http.post, CHAT, json=chat(max_tokens=3000))
        until(lambda: brake.forwards > 3)
        server.server.stop()
        assert_clean(running_one.result(), 503, "stopping")
        assert brake.forwards < 2900


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(tmp_path):
    folder = tmp_path / "contexts"
    command = [sys.executable, "-c", "from kvfold.cli import main; main()", "serve", "bundled"]
    made = subprocess.Popen(
        [*command, "--port", "0", "--folder", str(folder), "--budget", "64"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "KVFOLD_API_KEY": "hidden-key"},
    )
    assert made.stdout is not None
    url = next(found[0] for line in made.stdout if (found := re.search(r"http://\S+/v1", line)))
    client = httpx.Client(headers={"Authorization": "Bearer hidden-key"}, timeout=60)
    text = "The grass is green. " * 20
    name = client.post(f"{url}/contexts", json={"text": text}).json()["id"]
    messages = [{"role": "user", "content": "What is green?"}]
    asked = {"model": "bundled", "messages": messages, "temperature": 0, "max_tokens": 6}
    first = client.post(f"{url}/chat/completions", json=asked | {"context_id": name}).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] > 80
    assert "hidden-key" not in client.get(url.replace("/v1", "/openapi.json")).text
    made.send_signal(signal.SIGTERM)
    assert made.wait(20) == 0
    assert [path.name for path in folder.iterdir()] == [f"{name}.kvfold"]
    alone = kvfold.load(folder / f"{name}.kvfold", *kvfold.bundled_model())
    said = first["choices"][0]["message"]["content"]
    assert said == alone.ask("What is green?", max_new_tokens=6)


def test_the_command_refuses(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert "cannot listen on 127.0.0.1" in refused("serve", "none", "--port", port)
    free = ("--port", "0")
    assert "cannot read 'much'" in refused("serve", "bundled", *free, "--memory", "much")
    assert "unknown method" in refused("serve", "bundled", *free, "--method", "none")
    assert "the API key is empty" in refused("serve", "bundled", *free, "--api-key", " ")
    path = tmp_path / "file"
    path.write_text("")
    assert "contexts' folder" in refused("serve", "bundled", *free, "--folder", str(path))
    monkeypatch.setitem(sys.modules, "kvfold.serve.engine", None)
    assert "pip install 'kvfold[serve]'" in refused("serve", "bundled", *free)
