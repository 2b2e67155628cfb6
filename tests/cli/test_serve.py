# SPDX-License-Identifier: Apache-2.0
"""`kvfold serve`: it serves until it is told to stop, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

import kvfold
from tests.helpers.commands import refused


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
    assert {path.name for path in folder.iterdir()} == {f"{name}.kvfold", "sessions"}
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
