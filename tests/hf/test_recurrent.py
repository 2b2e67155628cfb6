# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers that begin anew with every forward of several tokens are fed token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import CompressedCache, KvfoldError
from kvfold.hf.recurrent import restarts
from tests.helpers.caches import ALONE, BATCHES
from tests.helpers.contexts import DOCUMENT, QUESTION
from tests.helpers.longrope import assists
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import worst

GREEDY = {
    "do_sample": False,
    "max_new_tokens": 4,
    "return_dict_in_generate": True,
    "output_logits": True,
}
CLOSE = 1e-4  # recurrent layers compute in float32


def logits(made: Any) -> Tensor:
    return torch.stack(made.logits, 1)


@pytest.mark.parametrize(
    ("name", "expected"), [("jamba", True), ("bamba", False), ("qwen3_5", False), ("llama", False)]
)
def test_models_that_begin_anew_are_found(name, expected):
    model = build(name)
    CompressedCache(model, "knorm", 20)
    assert restarts(model) is expected


@BATCHES
@pytest.mark.parametrize("chunk", [None, 10])
def test_turns_and_pieces_are_the_text_read_at_once(lengths, chunk):
    ids, mask = prompts(lengths)
    model = build("jamba", torch.float64)
    cache = CompressedCache(model, "full")
    options = {"cache": cache, "prefill_chunk": chunk, **GREEDY}
    if chunk is not None and lengths != ALONE:
        with pytest.raises(KvfoldError, match="would not skip padding"):
            kvfold.generate(model, ids, attention_mask=mask, **options)
        assert cache.get_seq_length() == 0
        options["prefill_chunk"] = 41  # the padding of all rows
    first = kvfold.generate(model, ids, attention_mask=mask, **options).sequences
    whole = torch.cat([first, continuation(len(ids), 9)], 1)
    mask = torch.cat([mask, torch.ones(len(ids), whole.shape[1] - 64, dtype=torch.long)], 1)
    made = kvfold.generate(model, whole, attention_mask=mask, **options)
    at_once = build("jamba", torch.float64).generate(whole, attention_mask=mask, **GREEDY)
    assert worst(logits(made), logits(at_once)) <= CLOSE


def test_a_later_turn_ends_with_an_eviction():
    """Its tokens are one prefill, though they are read one by one."""
    ids, model = prompts(ALONE)[0], build("jamba")
    cache = CompressedCache(model, "snapkv:window=8", 20)
    kvfold.generate(model, ids, cache=cache, max_new_tokens=1)
    turn = torch.cat([ids, continuation(1, 30)], 1)
    kvfold.generate(model, turn, cache=cache, max_new_tokens=1)
    for layer in range(len(cache.states)):
        (heads,) = cache.positions(layer)
        assert {len(head) for head in heads} == {20}
        assert all(set(range(94 - 8, 94)) <= set(head.tolist()) for head in heads)


def test_a_question_to_a_context_goes_on_from_the_document():
    model, tokenizer = build("jamba", torch.float64), word_tokenizer()
    asked = kvfold.compress(model, tokenizer, DOCUMENT, "full").ask(QUESTION, max_new_tokens=4)
    ids = tokenizer(f"{DOCUMENT}\n\n{QUESTION}\n", return_tensors="pt").input_ids
    made = build("jamba", torch.float64).generate(ids, do_sample=False, max_new_tokens=4)
    assert asked == tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).strip()


@assists
def test_assisted_decoding_is_refused():
    model, ids = build("jamba"), prompts(ALONE)[0]
    cache = CompressedCache(model, "snapkv:window=8", 20)
    with pytest.raises(KvfoldError, match="begin anew"):
        kvfold.generate(model, ids, cache=cache, prompt_lookup_num_tokens=3, max_new_tokens=4)
    assert cache.get_seq_length() == 0
