# SPDX-License-Identifier: Apache-2.0
"""A server that decodes by captured steps, which run uncaptured on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

import kvfold
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.generation.static.captured import CapturedStep
from tests.helpers.contexts import DOCUMENT, QUESTION
from tests.helpers.models import build
from tests.helpers.serving import running
from tests.helpers.tokenizers import word_tokenizer


@pytest.mark.parametrize(
    ("method", "captured"),
    [("snapkv", True), ("h2o", True), ("adakv", True), ("kivi:group=8", True), ("rkv", False)],
)
def test_answers_are_those_of_eager_steps(
    method: str, captured: bool, model: Any, monkeypatch: Any
) -> None:
    """A method whose steps cannot be captured decodes eagerly."""
    steps: list[object] = []
    step = CapturedStep.__call__

    def counting(self: CapturedStep, **inputs: Any) -> Any:
        steps.append(inputs)
        return step(self, **inputs)

    monkeypatch.setattr(CapturedStep, "__call__", counting)
    said = []
    budget = {"budget": 40} if kvfold.parse(method).takes_budget else {}
    for capture in (True, False):
        with running(model, word_tokenizer(), capture=capture) as server:
            context = server.create(DOCUMENT, method=method, **budget)
            said.append(server.says(QUESTION, context_id=context, max_tokens=12))
            said.append(server.says(QUESTION, context_id=context, max_tokens=12))
            assert bool(steps) == (capture and captured)
            steps.clear()
    assert len(set(said)) == 1 and said[0]


def test_a_model_whose_steps_cannot_be_captured_is_refused_at_the_start() -> None:
    with (
        pytest.raises(UnsupportedModel, match="capture=True needs a model all of whose layers"),
        running(build("gemma3"), word_tokenizer(), capture=True),
    ):
        pass


def test_settings_of_the_model_that_forbid_graphs_are_refused_at_the_start() -> None:
    """Not at each request."""
    model = build("llama")
    model.generation_config.disable_compile = True
    with (
        pytest.raises(KvfoldError, match="capture=True does not go with disable_compile=True"),
        running(model, word_tokenizer(), capture=True),
    ):
        pass
