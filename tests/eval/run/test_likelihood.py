# SPDX-License-Identifier: Apache-2.0
"""Likelihoods of continuations after a compressed context."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvfold.eval.tasks import Question
from tests.helpers.evaluation import Setting, book, surprise, words


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting.new()


def test_a_continuation_is_scored_after_what_was_compressed(setting):
    sample = replace(book("continuation"), questions=(Question(" and so " + words(12), (), 0),))
    prompt = setting.prompt(sample)
    asked = prompt.question_ids(sample.questions[0])
    whole = surprise(setting, torch.cat([prompt.ids, asked], 1))
    full, small = (
        setting.outcome(sample, *how).answers[0] for how in ((), ("streaming_llm_original", "0.2"))
    )
    expected = float(whole[prompt.ids.shape[1] :].mean())
    assert full.nll == pytest.approx(expected, abs=1e-4)
    assert full.tokens == small.tokens == asked.shape[1] - 1
    count, room = prompt.ids.shape[1], prompt.ids.shape[1] // 5
    ids = torch.cat([prompt.ids, asked], 1)
    query, key = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])
    gone = (key >= 4) & (key < count - (room - 4)) & (query >= count)
    expected = float(surprise(setting, ids, (key <= query) & ~gone)[count:].mean())
    assert small.nll == pytest.approx(expected, abs=1e-4)
    assert abs(small.nll - full.nll) > 1e-2


def test_a_text_without_numbers_for_probabilities_is_an_error(setting, monkeypatch):
    head = setting.model.lm_head
    monkeypatch.setattr(head, "forward", lambda x: x.new_full((*x.shape[:2], 2048), math.nan))
    assert "nan" in setting.error(book("perplexity"))
