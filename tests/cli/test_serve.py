# SPDX-License-Identifier: Apache-2.0
"""`kvfold serve`: it serves until it is told to stop, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import kvfold
from tests.helpers.commands import kvfold_command, refused


def served(folder: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """A server of the bundled model that keeps its files in `folder`, and its address."""
    command = [sys.executable, "-c", "from kvfold.cli import main; main()", "serve", "bundled"]
    made = subprocess.Popen(
        [*command, "--port", "0", "--folder", str(folder), *options],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "KVFOLD_API_KEY": "hidden-key"},
    )
    assert made.stdout is not None
    return made, next(
        found[0] for line in made.stdout if (found := re.search(r"http://\S+/v1", line))
    )


def with_key() -> httpx.Client:
    return httpx.Client(headers={"Authorization": "Bearer hidden-key"}, timeout=60)


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(tmp_path):
    folder = tmp_path / "contexts"
    made, url = served(folder, "--budget", "64")
    client = with_key()
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


@pytest.mark.whole
def test_a_kill_in_the_middle_of_forty_turns_loses_nothing(tmp_path):
    """The turn that was being answered is sent again, if the next server does not have it."""
    opening, budget = "You keep a list of files. ", 200
    turns = [f"File {number} is in folder {number % 7}. Where is it?" for number in range(40)]

    def body(text: str, **options: Any) -> dict[str, Any]:
        message = {"role": "user", "content": text}
        asked = {"model": "bundled", "session_id": "agent", "messages": [message]}
        return asked | {"temperature": 0, "max_tokens": 8} | options

    made, url = served(tmp_path)
    answers, client = list[str | None](), with_key()
    begun = {"id": "agent", "text": opening, "method": "snapkv", "budget": budget}
    assert client.post(f"{url}/sessions", json=begun).status_code == 201
    for number, text in enumerate(turns):
        if number == 20:
            cut = body(text, stream=True)
            with client.stream("POST", f"{url}/chat/completions", json=cut) as streamed:
                next(streamed.iter_lines())
                made.kill()
            assert made.wait(20) == -signal.SIGKILL
            made, url = served(tmp_path)
            held = client.get(f"{url}/sessions/agent").json()["turns"]
            assert held in (20, 21)  # nothing of the turn, or all of it
            if held == 21:
                answers.append(None)
                continue
        answered = client.post(f"{url}/chat/completions", json=body(text)).json()
        answers.append(answered["choices"][0]["message"]["content"])
    known = client.get(f"{url}/sessions/agent").json()
    made.terminate()
    assert made.wait(20) == 0
    alone = kvfold.begin_session(*kvfold.bundled_model(), opening, "snapkv", budget)
    for text, answer in zip(turns, answers, strict=True):
        assert answer in (None, alone.ask(text, max_new_tokens=8).text.strip())
    assert (known["turns"], known["tokens"]) == (40, alone.ids.shape[1])
    assert known["compactions"] == alone.record.compactions > 1


@pytest.mark.slow
def test_the_command_refuses(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert "cannot listen on 127.0.0.1" in refused("serve", "none", "--port", port)
    free = ("--port", "0")
    with_vllm = refused("serve", "none", "--engine", "vllm", "--shadow", "0.01")
    assert "--shadow compares answers of kvfold's own server" in with_vllm
    assert "needs --shadow" in refused("serve", "none", "--shadow-tolerance", "0.1")
    assert "cannot read 'much'" in refused("serve", "bundled", *free, "--memory", "much")
    assert "unknown method" in refused("serve", "bundled", *free, "--method", "none")
    assert "the API key is empty" in refused("serve", "bundled", *free, "--api-key", " ")
    assert "there is no codec 'gzip'" in refused("serve", "none", *free, "--codec", "gzip")
    path = tmp_path / "file"
    path.write_text("")
    told = kvfold_command("serve", "none", *free, "--folder", str(path))
    assert told.exit_code == 2 and "Invalid value for '--folder'" in told.output
    monkeypatch.setitem(sys.modules, "kvfold.serve.engine", None)
    assert "pip install 'kvfold[serve]'" in refused("serve", "bundled", *free)
