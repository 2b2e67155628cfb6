# SPDX-License-Identifier: Apache-2.0
"""Sampling: a seed fixes an answer, tokens come by their probability."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import kvfold
from tests.helpers.chats import chat_tokenizer
from tests.helpers.contexts import DOCUMENT, QUESTION
from tests.helpers.serving import Running, running


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chat_tokenizer()


@pytest.fixture(scope="module")
def server(model: Any, tokenizer: Any) -> Any:
    with running(model, tokenizer, workers=2) as made:
        yield made


@pytest.fixture
def context(server: Running) -> Any:
    name = server.create(DOCUMENT)
    yield name
    server.http.delete(f"/v1/contexts/{name}")


@pytest.fixture(scope="module")
def alone(model: Any, tokenizer: Any) -> kvfold.Context:
    return kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)


@pytest.mark.slow
def test_a_seed_fixes_an_answer_whatever_else_is_answered(server, context, alone):
    def drawn(seed: int | None, temperature: float = 2.0, **options: Any) -> str:
        asked = {"context_id": context, "temperature": temperature, "seed": seed}
        return server.says(QUESTION, **asked, **options)

    lone = {seed: drawn(seed) for seed in range(3)}
    assert len(set(lone.values())) > 1
    with ThreadPoolExecutor(6) as pool:
        seeds = [0, None, 1, None, 2] * 4
        for seed, text in zip(seeds, pool.map(drawn, seeds), strict=True):
            assert seed is None or text == lone[seed]
    greedy = alone.ask(QUESTION, max_new_tokens=8)
    assert drawn(0, top_p=1e-6) == greedy == drawn(1, temperature=1e-3)


def test_tokens_are_drawn_by_their_probability():
    from kvfold.serve.served_model import TokenSampler

    draw = TokenSampler(torch.Generator().manual_seed(0))
    share = torch.tensor([0.1, 0.6, 0.3])
    drawn = torch.cat([draw(None, share.log()[None]).argmax(-1) for _ in range(4000)])
    found = drawn.bincount(minlength=3) / len(drawn)
    assert torch.allclose(found, share, atol=0.03)
