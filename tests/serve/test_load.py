# SPDX-License-Identifier: Apache-2.0
"""Two hundred requests at once with the bundled model; whatever the description allows."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from functools import partial
from itertools import cycle
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvfold
from kvfold.eval import short_ruler
from kvfold.hf.chat_template import token_count
from kvfold.serve.request_schemas import ChatRequest, CompletionRequest, ContextRequest
from tests.helpers.chats import TEMPLATE
from tests.helpers.contexts import DOCUMENT, new_model
from tests.helpers.serving import Running, running
from tests.helpers.tokenizers import word_tokenizer

CONTEXTS, QUESTIONS, TOKENS = 20, 10, 24
METHODS = [("kvzip", 0.5), ("snapkv", 0.6), ("full", None), ("adakv", 0.7)]

NEEDED = ("model", "messages", "prompt", "text", "file")
ASKED = {"messages": [{"role": "user", "content": "Which one?"}], "prompt": "Which one?"}


def caches() -> int:
    gc.collect()
    return sum(type(held) is kvfold.CompressedCache for held in gc.get_objects())


async def asked(
    client: httpx.AsyncClient, sample: short_ruler.NeedleDocument, question: str, name: str | None
) -> str:
    """The answer to a question about a context, by its name or after the whole text."""
    content = question if name else f"{sample.document}\n\n{question}"
    body = {
        "model": "bundled",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "context_id": name,
    }
    answered = await client.post("/v1/chat/completions", json=body)
    assert answered.status_code == 200, answered.text
    told = answered.json()
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 150
    return str(told["choices"][0]["message"]["content"])


async def all_at_once(
    server: Running, samples: list[short_ruler.NeedleDocument], names: list[str]
) -> tuple[list[list[str]], int]:
    """Every answer of every sample, and the most bytes that contexts took meanwhile."""
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, server.engine.contexts.nbytes)
            await asyncio.sleep(0.002)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        watching = asyncio.ensure_future(watch())
        # One question of each context after the other: the least recently used is asked next.
        jobs = [
            asked(client, sample, sample.questions[j].text, name if j % 2 else None)
            for j in range(QUESTIONS)
            for sample, name in zip(samples, names, strict=True)
        ]
        answers = await asyncio.gather(*jobs)
        watching.cancel()
    return [answers[i::CONTEXTS] for i in range(CONTEXTS)], most


def serve(model: Any, tokenizer: Any, samples: list[short_ruler.NeedleDocument]) -> list[list[str]]:
    """The server's answers; it holds nothing when all contexts are deleted."""
    with running(model, tokenizer, "bundled", workers=2, queue=200, memory=4_000_000) as server:
        held = server.engine.contexts
        names = [
            server.create(sample.document, method=method, budget=budget)
            for sample, (method, budget) in zip(samples, cycle(METHODS), strict=False)
        ]
        assert sum(one.size for one in held.all()) > 2 * held.memory
        answers, most = asyncio.run(all_at_once(server, samples, names))
        assert 0 < most <= held.memory and held.to_memory > CONTEXTS
        assert server.metric('kvfold_prefix_cache_total{result="hit"}') == CONTEXTS * QUESTIONS / 2
        for name in names:
            assert server.http.delete(f"/v1/contexts/{name}").status_code == 200
        assert held.nbytes == 0 and held.all() == []
        assert list(held.folder.path.iterdir()) == []
    assert not held.folder.path.exists()
    return answers


@pytest.mark.whole
def test_two_hundred_requests_over_twenty_contexts():
    model, tokenizer = kvfold.bundled_model()
    generator, count = random.Random(0), partial(token_count, tokenizer)
    samples = [
        short_ruler.generate("multikey", 200, count, generator, questions=QUESTIONS)
        for _ in range(CONTEXTS)
    ]
    before, right, alone = caches(), 0, []
    for sample, (method, budget) in zip(samples, cycle(METHODS), strict=False):
        context = kvfold.compress(model, tokenizer, sample.document, method, budget)
        alone.append([context.ask(q.text, max_new_tokens=TOKENS) for q in sample.questions])
        right += sum(q.score(a) for q, a in zip(sample.questions, alone[-1], strict=True))
    del context
    # Answers that are worth comparing: most are true, and they differ.
    assert right > 120 and len({answer for answers in alone for answer in answers}) > 50
    assert serve(model, tokenizer, samples) == alone
    assert caches() == before


@pytest.fixture(scope="module")
def description() -> Any:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    with running(new_model(), tokenizer, answer_tokens=4, context_tokens=300) as server:
        server.create(DOCUMENT, id="a")
        yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.whole
def test_nothing_that_the_description_allows_fails(description):
    seen: set[tuple[str, int]] = set()
    for result in description.get_all_operations():
        operation = result.ok()

        @given(operation.as_strategy(), st.sampled_from(["tiny", None]), st.booleans())
        @settings(
            max_examples=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        def holds(case: Any, model: str | None, short: bool) -> None:
            # Past the first checks.
            if model and isinstance(case.body, dict) and "model" in case.body:
                case.body |= {"model": model}
            if short and isinstance(case.body, dict):
                case.body = {k: v for k, v in case.body.items() if k in NEEDED}
                case.body |= {k: v for k, v in ASKED.items() if k in case.body}
            answered = case.call()
            seen.add((case.operation.path, answered.status_code))
            assert answered.status_code < 500 and "Traceback" not in answered.text
            if answered.status_code >= 400:
                assert answered.json()["error"]["message"]

        holds()
    answered = {path for path, status in seen if status < 300}
    assert answered >= {"/v1/chat/completions", "/v1/completions", "/v1/contexts"}
    assert ("/v1/contexts/{context_id}", 404) in seen


@pytest.mark.whole
def test_nothing_that_the_description_forbids_fails(description):
    seen: set[int] = set()
    for result in description.get_all_operations():
        operation = result.ok()
        if operation.method.upper() != "POST":
            continue
        wrong = operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

        @given(wrong)
        @settings(
            max_examples=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        def holds(case: Any) -> None:
            answered = case.call()
            seen.add(answered.status_code)
            assert answered.status_code < 500 and "Traceback" not in answered.text

        holds()
    assert 400 in seen


FIELDS = [
    (path, name)
    for path, kind in (
        ("/v1/chat/completions", ChatRequest),
        ("/v1/completions", CompletionRequest),
        ("/v1/contexts", ContextRequest),
    )
    for name in kind.model_fields
]
ODD: list[Any] = [
    -1, 0, 1e-320, 1e308, -0.0, 2**63, 10**400, True, "", "a" * 10**4, "\ud800", "\0", [], [[]],
    [None], {}, {"a": {}}, [{"role": "user"}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
]  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("path, name", FIELDS, ids=[" ".join(field) for field in FIELDS])
def test_no_value_of_any_field_fails(description, path, name):
    right = {
        "/v1/contexts": {"text": "the sky is blue", "method": "full"},
        "/v1/completions": {"model": "tiny", "prompt": "the sky", "max_tokens": 2},
        "/v1/chat/completions": {
            "model": "tiny", "messages": [{"role": "user", "content": "the"}], "max_tokens": 2,
        },
    }[path]  # fmt: skip
    url = description.config.base_url or description.get_base_url()
    with httpx.Client(base_url=url, timeout=60) as client:
        for value in ODD:
            body = json.dumps(right | {name: value})
            headers = {"content-type": "application/json"}
            answered = client.post(path, content=body, headers=headers)
            assert answered.status_code < 500, (value, answered.text)


def test_the_description_names_every_path(description):
    assert {operation.ok().path for operation in description.get_all_operations()} >= {
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/contexts",
        "/v1/contexts/{context_id}",
        "/health",
        "/ready",
        "/metrics",
    }
