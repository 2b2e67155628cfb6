# SPDX-License-Identifier: Apache-2.0
"""vLLM's own server as a child process, with the proxy in front of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from kvfold.errors import KvfoldError
from kvfold.serve.connections import limited
from kvfold.serve.settings import Settings
from kvfold.serve.vllm.auth import Door
from kvfold.serve.vllm.catalog import Contexts
from kvfold.serve.vllm.proxy import Proxy, build

LOCAL = "127.0.0.1"
# Seconds: between looks at a child that starts, and for one that ends.
LOOK, ENDING = 0.5, 20.0


@dataclass(frozen=True)
class Engine:
    """What vLLM is started with; `arguments` are further ones of its own command line."""

    model: str
    name: str
    dtype: str
    contexts: Path
    api_key: str | None
    arguments: Sequence[str] = ()

    def command(self, port: int) -> list[str]:
        """The command line."""
        transfer = {
            "kv_connector": "KvfoldConnector",
            "kv_connector_module_path": "kvfold.serve.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"contexts": str(self.contexts.resolve())},
        }
        given = {
            "--model": self.model,
            "--served-model-name": self.name,
            "--dtype": self.dtype,
            "--host": LOCAL,
            "--port": str(port),
            "--kv-transfer-config": json.dumps(transfer),
        }
        options = [word for pair in given.items() for word in pair]
        return [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *options,
            *self.arguments,
        ]


class Server(uvicorn.Server):
    """Ends when it is told to, or when vLLM does."""

    def __init__(self, app: FastAPI, child: subprocess.Popen[bytes]) -> None:
        connections = limited(Settings.connections, Settings.client_timeout)
        super().__init__(
            uvicorn.Config(app, http=connections, log_level="warning", access_log=False)  # type: ignore[arg-type]
        )
        self.child = child

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; whether to exit."""
        self.should_exit |= self.child.poll() is not None
        return await super().on_tick(counter)


def serve(engine: Engine, contexts: Contexts, bound: socket.socket, *, body: int) -> None:
    """Answers on a bound socket until it is told to stop; raises KvfoldError where vLLM ends."""
    with _ending_well(), started(engine) as (child, address):
        longest = _longest(address, engine.api_key)
        client = httpx.AsyncClient(base_url=address, timeout=None)
        proxy = Proxy(contexts, client, Door(engine.api_key, body), longest)
        Server(build(proxy), child).run([bound])
        if child.poll() is not None:
            raise KvfoldError(f"vLLM has ended with code {child.returncode}: its log is above")


@contextmanager
def _ending_well() -> Iterator[None]:
    """SIGTERM ends the block as an exit does, so that vLLM is told to end, too."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def started(engine: Engine) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """vLLM and its address, ready for requests; raises KvfoldError where it does not start."""
    with socket.socket() as free:
        free.bind((LOCAL, 0))
        port = free.getsockname()[1]
    environment = dict(os.environ)
    if engine.api_key is not None:
        environment["VLLM_API_KEY"] = engine.api_key
    # Of a group of its own: it is told to end after the last answer, and not by the terminal.
    child = subprocess.Popen(engine.command(port), env=environment, start_new_session=True)
    try:
        address = f"http://{LOCAL}:{port}"
        _wait(child, address)
        yield child, address
    finally:
        _end(child)


def _wait(child: subprocess.Popen[bytes], address: str) -> None:
    """Until vLLM is ready."""
    while True:
        if child.poll() is not None:
            raise KvfoldError(
                f"vLLM has not started and ended with code {child.returncode}: its log is above"
            )
        with suppress(httpx.HTTPError):
            if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                return
        time.sleep(LOOK)


def _longest(address: str, api_key: str | None) -> int:
    """Tokens that a prompt and its answer may have."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    models = httpx.get(f"{address}/v1/models", headers=headers, timeout=30).json()
    return int(models["data"][0]["max_model_len"])


def _end(child: subprocess.Popen[bytes]) -> None:
    """Tells vLLM and its workers to end, and makes sure of it."""
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(ENDING)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
