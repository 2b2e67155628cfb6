# SPDX-License-Identifier: Apache-2.0
"""A server with low limits that answers as before after each test; holders of contexts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold.serve.context_folder import ContextFolder
from kvfold.serve.context_pool import ContextPool
from kvfold.serve.stored import size_of
from tests.helpers.contexts import DOCUMENT, QUESTION, new_model
from tests.helpers.serving import BODY_LIMIT, Running, running, until
from tests.helpers.tokenizers import word_tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def server(model: Any) -> Iterator[Running]:
    limits = {"body": BODY_LIMIT, "context_tokens": 400, "answer_tokens": 3000, "queue": 1}
    with running(model, word_tokenizer(), **limits) as made:
        yield made


@pytest.fixture(scope="module")
def context(server: Running) -> str:
    return server.create(DOCUMENT)


@pytest.fixture
def goes_on(server: Running, context: str) -> Iterator[None]:
    """After each test the server answers as before, and nobody is left."""
    yield
    until(lambda: server.engine.workers.admitted == 0)
    held = server.engine.contexts.get(context)
    until(lambda: held.readers == 0)
    assert server.says(QUESTION, context_id=context)


@pytest.fixture(scope="module")
def hurried(model: Any) -> Iterator[Running]:
    limits: dict[str, Any] = {"client_timeout": 0.5, "connections": 6, "queue": 2, "body": 10**6}
    with running(model, word_tokenizer(), **limits) as made:
        yield made


DOCUMENTS = [" ".join(random.Random(i).sample(DOCUMENT.split(), 120)) for i in range(6)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


@pytest.fixture(scope="module")
def made(model: Any, tokenizer: Any) -> list[kvfold.Context]:
    return [kvfold.compress(model, tokenizer, text, "snapkv", 40) for text in DOCUMENTS]


@pytest.fixture
def holder(model: Any, tokenizer: Any, made: Any, tmp_path: Path) -> Iterator[Any]:
    """Makes a holder with room for so many contexts."""
    load = partial(kvfold.load, model=model, tokenizer=tokenizer)
    holders = []

    def new(room: float, most: int = 100, folder: Path | None = None) -> ContextPool:
        holders.append(ContextPool(load, ContextFolder(folder), int(room * size_of(made[0])), most))
        return holders[-1]

    yield new
    for one in holders:
        one.folder.close()
