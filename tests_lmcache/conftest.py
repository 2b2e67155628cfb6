# SPDX-License-Identifier: Apache-2.0
"""LMCache's own server on a CPU, and no reports about its use."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch

os.environ |= {
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}
torch.set_num_threads(1)

from tests_lmcache.engine import CHUNK, Server  # noqa: E402


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with chunks of `CHUNK` tokens that may take the SDK's transfers and queries."""
    ports, log = _free_ports(2), tmp_path_factory.mktemp("lmcache") / "server.log"
    command = [
        str(Path(sys.executable).with_name("lmcache")), "server",
        "--l1-size-gb", "1", "--eviction-policy", "LRU", "--chunk-size", str(CHUNK),
        "--port", str(ports[0]), "--http-port", str(ports[1]),
        "--supported-transfer-mode", "auto", "--enable", "transfer_query",
    ]  # fmt: skip
    running = Server(f"tcp://localhost:{ports[0]}", f"http://localhost:{ports[1]}")
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            _wait(running, process, log)
            yield running
        finally:
            process.terminate()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(f"{server.http_url}/healthcheck", timeout=5).ok:
                return
        except requests.ConnectionError:
            time.sleep(0.2)
    raise RuntimeError(f"LMCache's server did not start:\n{log.read_text()[-3000:]}")
