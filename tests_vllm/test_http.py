# SPDX-License-Identifier: Apache-2.0
"""`kvfold serve --engine vllm` over HTTP, with OpenAI's client."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvfold.serve.vllm.export import Paged
from kvfold.serve.vllm.placeholders import ServedFolder
from tests_vllm.bundled import NEW, SIXTEEN, UNEVEN, Kvfold, asked, paged
from tests_vllm.server import KEY, START, served

NAME = "whole-pages"


@pytest.fixture(scope="module")
def paged_folder(made: Kvfold, folder: Path) -> ServedFolder:
    """As the server reads it."""
    return ServedFolder(folder, Paged(32))


@pytest.fixture(scope="module")
def address(folder: Path, made: Kvfold) -> Iterator[str]:
    """The proxy, with vLLM behind it, compiled as users have it."""
    with served(folder) as found:
        yield found


@pytest.fixture
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)


def chat(client: openai.OpenAI, name: str, question: str, **options: Any) -> Any:
    return client.chat.completions.create(
        model="bundled",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        extra_body={"context_id": name},
        **options,
    )


def test_a_chat_answers_as_the_library_does(client, made):
    for name in ("whole-pages", "broken-page", "moving-sinks", "segments"):
        for question in made.questions:
            answer = chat(client, name, question, max_tokens=NEW)
            expected = made.contexts[name].ask(question, max_new_tokens=NEW)
            assert answer.choices[0].message.content.strip() == expected


def test_tokens_are_those_of_the_library(address, made, served_folder):
    for _ in range(2):
        for question in made.questions:
            body = asked(served_folder, made, NAME, question).body
            body |= {"model": "bundled", "max_tokens": NEW, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            headers = {"Authorization": f"Bearer {KEY}"}
            answer = httpx.post(f"{address}/v1/completions", json=body, headers=headers).json()
            assert answer["choices"][0]["token_ids"] == made.answer(NAME, question)


def test_a_stream_brings_the_same_answer(client, made):
    whole = chat(client, NAME, made.questions[0], max_tokens=NEW)
    pieces = list(
        chat(
            client,
            NAME,
            made.questions[0],
            max_tokens=NEW,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(piece.choices[0].delta.content for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert len(pieces) > 3 and pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-1].usage.prompt_tokens == whole.usage.prompt_tokens > 256


def test_later_turns_answer_as_the_library_does(client, made):
    first, second = made.questions[:2]
    own = made.contexts[NAME].chat()
    said = own.ask(first, max_new_tokens=NEW)
    own = made.contexts[NAME].chat()
    own.add(first, said)
    messages = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": said},
        {"role": "user", "content": second},
    ]
    answer = client.chat.completions.create(
        model="bundled",
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=NEW,
        extra_body={"context_id": NAME},
    )
    expected = own.ask(second, max_new_tokens=NEW)
    assert answer.choices[0].message.content.strip() == expected


def test_a_completion_goes_on_from_the_document(client, made):
    answer = client.completions.create(
        model="bundled",
        prompt=made.question(NAME, made.questions[0]),
        temperature=0,
        max_tokens=NEW,
        extra_body={"context_id": NAME},
    )
    expected = made.contexts[NAME].ask(made.questions[0], max_new_tokens=NEW)
    assert answer.choices[0].text.strip() == expected


def test_a_text_in_a_request_is_compressed_on_arrival(address, client, made, paged_folder):
    """Its heads keep whole pages; vLLM reads none of it: its prompt is these and the question."""
    expected = made.contexts[paged("kvzip")]
    kept = paged_folder.get(paged("kvzip")).kept
    for question in made.questions:
        answer = client.chat.completions.create(
            model="bundled",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=NEW,
            extra_body={"context": made.document},
        )
        assert answer.choices[0].message.content.strip() == expected.ask(
            question, max_new_tokens=NEW
        )
        assert 0 < answer.usage.prompt_tokens - kept < 40
    headers = {"Authorization": f"Bearer {KEY}"}
    posted = {"text": made.document, "id": "posted"}
    about = httpx.post(f"{address}/v1/contexts", json=posted, headers=headers, timeout=60)
    assert about.status_code == 201 and about.json()["kept"] == kept
    pages = paged_folder.get(paged("kvzip")).pages
    assert about.json()["pages"] == sum(map(sum, pages.of_layers)) and "level" not in about.json()
    answer = chat(client, "posted", made.questions[0], max_tokens=NEW)
    assert answer.choices[0].message.content.strip() == expected.ask(
        made.questions[0], max_new_tokens=NEW
    )


@pytest.mark.parametrize("name", [UNEVEN, SIXTEEN])
def test_an_uneven_file_is_read_again_into_pages_when_it_is_first_asked(client, made, name):
    expected = made.contexts[name].paged(32)
    for question in made.questions:
        answer = chat(client, name, question, max_tokens=NEW)
        assert answer.choices[0].message.content.strip() == expected.ask(
            question, max_new_tokens=NEW
        )


def test_many_at_once_with_ordinary_requests(client, made):
    names = [None, "whole-pages", "broken-page", "segments"] * 6

    def ask(name: str | None) -> str:
        if name is not None:
            return chat(client, name, made.questions[0], max_tokens=NEW).choices[0].message.content
        answer = client.chat.completions.create(
            model="bundled",
            messages=[{"role": "user", "content": made.questions[1]}],
            temperature=0,
            max_tokens=NEW,
        )
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, names))
    assert len({text for name, text in zip(names, found, strict=True) if name is None}) == 1
    for name, text in zip(names, found, strict=True):
        if name is not None:
            assert text.strip() == made.contexts[name].ask(made.questions[0], max_new_tokens=NEW)


def test_hits_are_counted(address, client, made):
    def hits() -> tuple[float, float]:
        lines = httpx.get(f"{address}/metrics").text.splitlines()
        values = {line.partition("{")[0]: float(line.split()[-1]) for line in lines if "{" in line}
        names = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
        return values[names[0]], values[names[1]]

    chat(client, NAME, made.questions[0], max_tokens=2)
    before = hits()
    chat(client, NAME, made.questions[1], max_tokens=2)
    after = hits()
    assert (after[0] - before[0], after[1] - before[1]) == (256, 0)


@pytest.mark.parametrize(
    "name, status",
    [("none", 404), ("packed", 400), ("biased", 400), ("stranger", 400), ("../whole-pages", 400)],
)
def test_refusals_say_why(client, made, name, status):
    with pytest.raises(openai.APIStatusError) as refusal:
        chat(client, name, made.questions[0])
    assert refusal.value.status_code == status and refusal.value.message


def test_a_wrong_request_past_the_proxys_help_fails_and_vllm_goes_on(
    address, client, made, served_folder
):
    body = asked(served_folder, made, NAME, made.questions[0]).body | {"model": "bundled"}
    del body["cache_salt"]
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx.post(f"{address}/v1/completions", json=body, headers=headers).status_code == 500
    assert httpx.post(f"{address}/v1/completions", json=body).status_code == 401
    answer = chat(client, NAME, made.questions[0], max_tokens=NEW).choices[0].message.content
    assert answer.strip() == made.contexts[NAME].ask(made.questions[0], max_new_tokens=NEW)


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_running(folder, made, told):
    """A server that is told to stop takes vLLM and its workers with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", START, str(port), KEY, str(folder)]
    # A shell that starts the tests in the background has SIGINT ignored, also in what they start.
    process = subprocess.Popen(
        command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    while not (children := _children(process.pid)) and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(told)
    process.wait(60)
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < until:
        time.sleep(0.2)
    assert children and not any(Path(f"/proc/{pid}").exists() for pid in children)


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []
