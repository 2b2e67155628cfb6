# SPDX-License-Identifier: Apache-2.0
"""A server in a thread, on a free port, and a model that stands still when it is told to."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import httpx

from kvfold.serve.engine import Engine
from kvfold.serve.process import GracefulServer, listening
from kvfold.serve.settings import ServerSettings
from tests.helpers.contexts import QUESTION
from tests.helpers.packages import Package

if TYPE_CHECKING:
    from openai import OpenAI

NAME = "tiny"


@dataclass
class Running:
    """A server that answers."""

    server: GracefulServer
    port: int

    @property
    def engine(self) -> Engine:
        return self.server.engine

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    @cached_property
    def openai(self) -> OpenAI:
        return Package("openai").OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60
        )

    def create(self, text: str, **options: Any) -> str:
        """The id of a new context."""
        made = self.http.post("/v1/contexts", json={"text": text, **options})
        assert made.status_code == 201, made.text
        return str(made.json()["id"])

    def chat(self, question: str, **options: Any) -> httpx.Response:
        messages = [{"role": "user", "content": question}]
        body = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 8}
        return self.http.post("/v1/chat/completions", json=body | options)

    def says(self, question: str, **options: Any) -> str:
        """The answer to a question."""
        answered = self.chat(question, **options)
        assert answered.status_code == 200, answered.text
        return str(answered.json()["choices"][0]["message"]["content"])

    def metric(self, line: str) -> float:
        """The value in the line of Prometheus' text that begins so."""
        for found in self.http.get("/metrics").text.splitlines():
            if found.startswith(f"{line} "):
                return float(found.rpartition(" ")[2])
        raise AssertionError(f"no metric {line}")


@contextmanager
def running(model: Any, tokenizer: Any, name: str = NAME, **settings: Any) -> Iterator[Running]:
    """A server until the block ends."""
    chosen = ServerSettings(**({"method": "snapkv", "budget": 40, "grace": 10} | settings))
    bound = listening("127.0.0.1", 0)
    server = GracefulServer(Engine(name, model, tokenizer, chosen))
    thread = Thread(target=server.run, args=([bound],))
    thread.start()
    until(lambda: server.started)
    try:
        yield Running(server, bound.getsockname()[1])
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Waits for something that other threads bring about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


class Brake:
    """Stops a model before its next forward, and counts those that began."""

    def __init__(self, model: Any) -> None:
        self.go, self.forwards = Event(), 0
        self.go.set()
        self.hook = model.register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        self.forwards += 1
        assert self.go.wait(30)


@contextmanager
def braked(model: Any) -> Iterator[Brake]:
    """A model that stands still until the brake is released, or the block ends."""
    brake = Brake(model)
    brake.go.clear()
    try:
        yield brake
    finally:
        brake.go.set()
        brake.hook.remove()


BODY_LIMIT = 20_000
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


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


def send(connection: socket.socket, body: dict[str, Any], path: str = CHAT) -> None:
    request = httpx.Request("POST", f"http://a{path}", json=body)
    connection.sendall(head(path, f"Content-Length: {len(request.content)}") + request.content)


CONTEXTS = "/v1/contexts"


def post(server: Running, path: str, body: bytes) -> httpx.Response:
    return server.http.post(path, content=body, headers={"content-type": "application/json"})


def opened(server: Running, *sent: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), 10)
    for part in sent:
        made.sendall(part)
    return made


def answered(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    with connection, suppress(ConnectionResetError):
        return b"".join(iter(lambda: connection.recv(65536), b""))
    return b""


def alone_until(words: list[str], stop: str) -> tuple[str, str]:
    return " ".join(words).partition(stop)[0].strip(), "stop"


def cached(answered: Any) -> int:
    return int(answered.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
