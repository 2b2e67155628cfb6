# SPDX-License-Identifier: Apache-2.0
"""Assisted decoding beside the model's own: lengths, processors, criteria, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold.errors import KvfoldError
from kvfold.generation.reading import read_per_chunk
from tests.helpers.contexts import DOCUMENT, new_model
from tests.helpers.longrope import assists
from tests.helpers.models import build, prompts
from tests.helpers.tokenizers import word_tokenizer

pytestmark = assists
LOOKUP: dict[str, Any] = {"prompt_lookup_num_tokens": 3, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    return build("llama")


def assisted(model: Any, ids: Tensor, **options: Any) -> Tensor:
    cache = kvfold.CompressedCache(model, "full")
    out: Tensor = kvfold.generate(model, ids, cache=cache, **LOOKUP, **options)
    return out


@pytest.mark.parametrize("limit", [{"max_length": 50}, {"max_new_tokens": 9}])
def test_limits_count_the_prompt_as_the_model_does(model, limit):
    (ids, _) = prompts((40,))
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **limit)
    assert torch.equal(assisted(model, ids, **limit), expected)


def test_processors_and_criteria_see_the_prompt(model):
    (ids, _) = prompts((40,))
    seen: list[Tensor] = []

    def forbids_what_was_read(given: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, given, -torch.inf)

    def stops_at_44(given: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        seen.append(given)
        return torch.tensor([given.shape[1] >= 44] * len(given))

    options = {
        "logits_processor": [forbids_what_was_read],
        "stopping_criteria": [stops_at_44],
        "max_new_tokens": 12,
    }
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, do_sample=False, **options)
    seen.clear()
    found = assisted(model, ids, **options)
    assert torch.equal(found[:, :44], expected) and found.shape[1] < 52
    assert all(torch.equal(each[:, :40], ids) for each in seen)


@pytest.mark.parametrize(
    "option",
    [
        {"repetition_penalty": 1.8},
        {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[3, 4]]},
        {"min_length": 45},
    ],
)
def test_settings_that_read_the_prompt_are_refused(model, option):
    (ids, _) = prompts((40,))
    (name,) = option
    with pytest.raises(KvfoldError, match=f"{name}=.* reads the prompt"):
        assisted(model, ids, max_new_tokens=4, **option)


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
@pytest.mark.parametrize("ahead", [LOOKUP, {"prefill_chunk": 10}], ids=str)
def test_outputs_of_a_prompt_that_is_read_ahead_are_refused(model, name, ahead):
    (ids, _), options = prompts((40,)), {"return_dict_in_generate": True, name: True}
    with pytest.raises(KvfoldError, match=f"{name}=True .* ahead of generate"):
        cache = kvfold.CompressedCache(model, "full")
        kvfold.generate(model, ids, cache=cache, max_new_tokens=4, **ahead, **options)
    assert cache.get_seq_length() == 0


def test_an_answer_ends_at_its_stop_string():
    chat = kvfold.compress(new_model(), word_tokenizer(), DOCUMENT, "knorm", 0.5).chat()
    whole = chat.reply("the sky is", keep=False, max_new_tokens=20)
    stop = whole.text.split()[2]
    for options in ({}, {"prompt_lookup_num_tokens": 3}):
        reply = chat.reply("the sky is", keep=False, max_new_tokens=20, stop=[stop], **options)
        assert reply.ended == "stop" and reply.tokens < 8


@pytest.mark.parametrize("method", ["full", "knorm"])
def test_plain_generate_is_refused_with_what_to_call(model, method):
    (ids, _) = prompts((40,))
    cache = kvfold.CompressedCache(model, method, None if method == "full" else 20)
    with pytest.raises(KvfoldError, match=r"frozen cache only: call kvfold\.generate\("):
        model.generate(ids, past_key_values=cache, max_new_tokens=3, **LOOKUP)


def test_drafts_are_checked_behind_pieces_that_were_compressed_one_by_one(model):
    cache, (ids, _) = kvfold.CompressedCache(model, "snapkv:window=4", 12), prompts((40,))
    how: dict[str, Any] = {"prefill_chunk": 10, "compress": "per_chunk", "max_new_tokens": 5}
    kvfold.generate(model, ids, cache=cache, **LOOKUP, **how)
    pieces = kvfold.CompressedCache(model, "snapkv:window=4", 12)
    read_per_chunk(model, pieces, ids[:, :-1], chunk=10)
    assert cache.per_chunk == 10
    kept, expected = cache.positions(0), pieces.positions(0)
    for of_head, wanted in zip(kept[0], expected[0], strict=True):
        assert of_head[: len(wanted)].equal(wanted)
