# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible endpoint on the loopback whose distributions are known."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

# From the last message's text to the probabilities of tokens
Distribution = Callable[[str], Mapping[str, float]]


def completion(probabilities: Mapping[str, float], top: int, read: int | None = 7) -> Any:
    """A chat completion with the `top` likeliest tokens."""
    likeliest = sorted(probabilities.items(), key=lambda item: -item[1])[:top]
    listed = [
        {"token": token, "logprob": float(np.log(p)), "bytes": [*token.encode()]}
        for token, p in likeliest
    ]
    choice = {"index": 0, "logprobs": {"content": [{**listed[0], "top_logprobs": listed}]}}
    return {"choices": [choice], "usage": {"prompt_tokens": read}}


@contextmanager
def served(
    distribution: Distribution,
    *,
    models: tuple[str, ...] = ("m",),
    top: int = 20,
    key: str | None = None,
    change: Callable[[Any], Any] = lambda answer: answer,
) -> Iterator[str]:
    """Address of a server that allows `top` tokens, and `change`s its answers."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def allowed(self) -> bool:
            right = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            if not right:
                self.answer(401, {"error": {"message": "wrong key"}})
            return right

        def do_GET(self) -> None:
            if self.allowed():
                self.answer(200, {"data": [{"id": name} for name in models]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.allowed():
                return
            assert asked["temperature"] == 0 and asked["max_tokens"] == 1 and asked["logprobs"]
            if asked["top_logprobs"] > top:
                self.answer(400, {"error": {"message": f"at most {top} log\nprobabilities"}})
                return
            probabilities = distribution(asked["messages"][-1]["content"])
            self.answer(200, change(completion(probabilities, asked["top_logprobs"])))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
