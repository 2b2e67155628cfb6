# SPDX-License-Identifier: Apache-2.0
"""vLLM's own server as a child process, with the proxy before it."""

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
from kvfold.serve.settings import ServerSettings
from kvfold.serve.vllm.arrivals import Arrivals
from kvfold.serve.vllm.catalog import ContextCatalog
from kvfold.serve.vllm.export import Paged
from kvfold.serve.vllm.proxy import Proxy, ProxyAuth, build

LOCAL = "127.0.0.1"
# Seconds: between checks of a starting child, and for a child to end.
POLL, TERMINATION = 0.5, 20.0


@dataclass(frozen=True)
class VllmOptions:
    """Options that vLLM is started with.

    `model` is a path or hub id, `name` its name in the API, `contexts` the folder of context files,
    `arguments` are further ones of vLLM's command line. `paged` are its pages of single heads,
    `evicts` what is evicted from all prompts.
    """

    model: str
    name: str
    dtype: str
    contexts: Path
    api_key: str | None
    arguments: Sequence[str] = ()
    paged: Paged | None = None
    evicts: dict[str, Any] | None = None

    def command(self, port: int) -> list[str]:
        """The command line of vLLM, listening on `port` of this machine only."""
        transfer = {
            "kv_connector": "KvfoldConnector",
            "kv_connector_module_path": "kvfold.serve.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"contexts": str(self.contexts.resolve())}
            | ({} if self.evicts is None else {"evict": self.evicts}),
        }
        given = {
            "--model": self.model,
            "--served-model-name": self.name,
            "--dtype": self.dtype,
            "--host": LOCAL,
            "--port": str(port),
            "--kv-transfer-config": json.dumps(transfer),
        }
        if self.paged is not None:
            given["--block-size"] = str(self.paged.block)
        options = [word for pair in given.items() for word in pair]
        return [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *options,
            *self.arguments,
        ]


class ProxyServer(uvicorn.Server):
    """uvicorn server of the proxy; exits also if vLLM does."""

    def __init__(self, app: FastAPI, child: subprocess.Popen[bytes]) -> None:
        connections = limited(ServerSettings.connections, ServerSettings.client_timeout)
        super().__init__(
            uvicorn.Config(app, http=connections, log_level="warning", access_log=False)  # type: ignore[arg-type]
        )
        self.child = child

    async def on_tick(self, counter: int) -> bool:
        """True if the server is to exit; uvicorn calls it ten times a second."""
        self.should_exit |= self.child.poll() is not None
        return await super().on_tick(counter)


def serve(
    engine: VllmOptions,
    contexts: ContextCatalog,
    bound: socket.socket,
    *,
    body: int,
    arrivals: Arrivals | None = None,
) -> None:
    """Runs vLLM and the proxy on a bound socket until stopped; `body` bounds requests, in bytes.

    Raises KvfoldError if vLLM does not start, or ends by itself.
    """
    with _exit_on_sigterm(), started(engine) as (child, address):
        longest = _longest(address, engine.api_key)
        client = httpx.AsyncClient(base_url=address, timeout=None)
        proxy = Proxy(contexts, client, ProxyAuth(engine.api_key, body), longest, arrivals)
        ProxyServer(build(proxy), child).run([bound])
        if child.poll() is not None:
            raise KvfoldError(f"vLLM has ended with code {child.returncode}: its log is above")


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Turns SIGTERM into SystemExit within the block, so that vLLM is stopped, too."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def started(engine: VllmOptions) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process of vLLM and its address, once it is ready.

    Raises KvfoldError if it ends first.
    """
    with socket.socket() as free:
        free.bind((LOCAL, 0))
        port = free.getsockname()[1]
    environment = dict(os.environ)
    if engine.api_key is not None:
        environment["VLLM_API_KEY"] = engine.api_key
    # A session of its own: Ctrl-C reaches the proxy only, which stops vLLM after the last answer.
    child = subprocess.Popen(engine.command(port), env=environment, start_new_session=True)
    try:
        address = f"http://{LOCAL}:{port}"
        _wait(child, address)
        yield child, address
    finally:
        _end(child)


def _wait(child: subprocess.Popen[bytes], address: str) -> None:
    """Waits until vLLM is healthy; raises KvfoldError if it ends."""
    while True:
        if child.poll() is not None:
            raise KvfoldError(
                f"vLLM has not started and ended with code {child.returncode}: its log is above"
            )
        with suppress(httpx.HTTPError):
            if httpx.get(f"{address}/health", timeout=5).status_code == 200:
                return
        time.sleep(POLL)


def _longest(address: str, api_key: str | None) -> int:
    """vLLM's `max_model_len`: tokens of prompt and answer together."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    models = httpx.get(f"{address}/v1/models", headers=headers, timeout=30).json()
    return int(models["data"][0]["max_model_len"])


def _end(child: subprocess.Popen[bytes]) -> None:
    """Terminates vLLM; kills its process group if that takes too long."""
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(TERMINATION)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
