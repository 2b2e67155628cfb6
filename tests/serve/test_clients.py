# SPDX-License-Identifier: Apache-2.0
"""Two turns with the usual clients: each sends its first answer back as it holds it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chats import TEMPLATE
from tests.helpers.contexts import DOCUMENT, new_model
from tests.helpers.packages import Package
from tests.helpers.serving import NAME, Running, running
from tests.helpers.tokenizers import word_tokenizer

FIRST, SECOND = "the sky is", "the grass is"
LITELLM = Path(__file__).parents[2] / ".venv-litellm" / "bin" / "python"

# What clients send that asks for nothing.
NOTHING: list[dict[str, Any]] = [
    {"tools": []},
    {"tools": None, "tool_choice": "none"},
    {"tool_choice": "auto", "parallel_tool_calls": True},
    {"response_format": {"type": "text"}},
    {"logit_bias": None},
    {"logit_bias": {}},
    {"metadata": {"a": "b"}, "store": False},
    {"store": True, "verbosity": "medium"},
    {"top_k": 0, "min_p": 0, "repetition_penalty": 1},
    {"top_k": -1, "chat_template_kwargs": {}},
    {"max_tokens": 10**6},
    {"store": None, "service_tier": "auto", "modalities": ["text"]},
    {"n": 1, "logprobs": False, "top_logprobs": None},
    {"functions": [], "function_call": None},
    {"reasoning_effort": None, "prediction": None, "audio": None},
    {"safety_identifier": "me", "prompt_cache_key": "me", "user": "me"},
    {"prompt_cache_retention": "24h"},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    with running(new_model(), tokenizer, answer_tokens=8) as made:
        made.create(DOCUMENT, id="a")
        yield made


@pytest.fixture(scope="module")
def expected(server: Running) -> tuple[str, str]:
    """Both answers, asked with nothing but roles and contents."""
    first = server.says(FIRST, context_id="a")
    turns = [("user", FIRST), ("assistant", first), ("user", SECOND)]
    messages = [{"role": role, "content": content} for role, content in turns]
    return first, server.says(SECOND, messages=messages, context_id="a")


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("given", NOTHING, ids=[" ".join(given) for given in NOTHING])
def test_what_asks_for_nothing_passes(server, expected, given):
    assert server.says(FIRST, context_id="a", **given) == expected[0]


def test_openai(server, expected):
    options = {"temperature": 0, "max_tokens": 8, "extra_body": {"context_id": "a"}}
    messages: list[Any] = [{"role": "user", "content": FIRST, "name": "me"}]
    create = server.openai.chat.completions.create
    first = create(model=NAME, messages=messages, **options).choices[0].message
    messages += [first.model_dump(), {"role": "user", "content": SECOND}]
    second = create(model=NAME, messages=messages, **options).choices[0].message
    assert (first.content, second.content) == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_langchain(server, expected, streaming):
    model = Package("langchain_openai").ChatOpenAI(
        model=NAME,
        base_url=f"{server.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=8,
        streaming=streaming,
        extra_body={"context_id": "a"},
    )
    said = Package("langchain_core.messages").HumanMessage
    first = model.invoke([said(FIRST)])
    second = model.invoke([said(FIRST), first, said(SECOND)])
    assert (first.content, second.content) == expected


TURNS = """
import litellm, sys
url, *questions = sys.argv[1:]
messages = []
for question in questions:
    messages.append({"role": "user", "content": question})
    answer = litellm.completion(
        "openai/tiny", messages, api_base=url, api_key="none", temperature=0, max_tokens=8,
        extra_body={"context_id": "a"},
    )
    messages.append(answer.choices[0].message.model_dump())
    print(answer.choices[0].message.content)
"""


@pytest.mark.whole
@pytest.mark.skipif(not LITELLM.exists(), reason="LiteLLM has an environment of its own")
def test_litellm(server, expected):
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    command = [str(LITELLM), "-c", TURNS, f"{server.url}/v1", FIRST, SECOND]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert tuple(ran.stdout.splitlines()) == expected
