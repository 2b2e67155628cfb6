# SPDX-License-Identifier: Apache-2.0
"""Likelihoods of continuations after a compressed context."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import kvfold
from kvfold.cache.fork import fork
from kvfold.eval.run.streaming import at_once, token_by_token
from kvfold.eval.tasks import Question
from kvfold.hf.models import read_tokens
from tests.helpers.evaluation import Setting, book, surprise, words
from tests.helpers.models import build, prompts

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


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


@pytest.mark.parametrize("family", ["llama", "roberta", "bamba", "jamba"])
def test_likelihoods_are_those_of_a_forward_without_a_cache(family):
    model, ids = build(family), prompts((40,))[0]
    with torch.no_grad():
        counted = {"position_ids": torch.arange(40)[None]} if family != "jamba" else {}
        logits = model(input_ids=ids, use_cache=False, **counted).logits[0, :-1]
    expected = -logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    cache = kvfold.CompressedCache(model, "full")
    read_tokens(model, ids[:, :20], cache, None)
    torch.testing.assert_close(at_once(model, fork(cache), ids[:, 20:]), expected[20:], **CLOSE)
    fresh = kvfold.CompressedCache(model, "full")
    torch.testing.assert_close(token_by_token(model, fresh, ids)[0], expected, **CLOSE)
