# SPDX-License-Identifier: Apache-2.0
"""Connections, and the time that clients take: each limit is driven to where it holds."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

import httpx
import pytest

from tests.helpers.serving import (
    CHAT,
    CONTEXTS,
    answered,
    assert_clean,
    chat,
    head,
    opened,
    running,
    until,
)
from tests.helpers.tokenizers import word_tokenizer


@pytest.mark.slow
def test_headers_that_do_not_come_close_the_connection(hurried):
    for begun in ((), (b"GET /health HTTP/1.1\r\n",), (b"POST /v1/contexts HTTP/1.1\r\nHost:",)):
        started = time.perf_counter()
        assert answered(opened(hurried, *begun)) == b""
        assert 0.3 < time.perf_counter() - started < 5
    # After an answer, too.
    twice = opened(hurried, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /hea")
    assert answered(twice).count(b"HTTP/1.1 200") == 1


@pytest.mark.slow
def test_a_body_that_does_not_come_is_refused_in_time(hurried):
    for path in (CHAT, CONTEXTS):
        begun = head(path, "Content-Length: 1000"), b'{"text'
        assert answered(opened(hurried, *begun)).startswith(b"HTTP/1.1 408")
    assert hurried.engine.workers.reserved == 0


def test_uploads_take_their_place_when_they_begin(model):
    with running(model, word_tokenizer(), queue=2) as server:
        begun = [opened(server, head(CONTEXTS, "Content-Length: 1000"), b'{"te') for _ in range(3)]
        until(lambda: server.engine.workers.reserved == 3)
        assert_clean(server.http.post(CHAT, json=chat()), 429, "3 requests are waiting")
        assert server.http.get("/health").status_code == 200
        for connection in begun:
            connection.close()
        until(lambda: server.engine.workers.reserved == 0)
        assert server.http.post(CHAT, json=chat()).status_code == 200


def test_a_connection_too_many_is_closed(hurried):
    hurried.http.close()
    del hurried.http
    until(lambda: not hurried.server.server_state.connections)
    held = [opened(hurried) for _ in range(6)]
    until(lambda: len(hurried.server.server_state.connections) == 6)
    assert b"HTTP/1.1 503" in answered(opened(hurried)) and answered(held[0]) == b""
    for connection in held:
        connection.close()
    assert httpx.get(f"{hurried.url}/health").status_code == 200


@pytest.mark.slow
def test_who_does_not_take_an_answer_is_closed(hurried):
    held = opened(hurried)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    # Answers of some megabytes in all, none of which is taken.
    with suppress(OSError):
        for _ in range(300):
            held.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n")
    until(lambda: not hurried.server.server_state.connections)
    held.close()
