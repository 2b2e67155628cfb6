# SPDX-License-Identifier: Apache-2.0
"""Tokens without an embedding and answers beyond learned positions: refused, by numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvfold
from kvfold.errors import KvfoldError
from kvfold.hf.lookups import learned_positions
from tests.helpers.models import build, prompts

LENGTH = 64


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return build("gpt2", n_positions=LENGTH)


def answers(model: Any, tokens: int, new: int, **options: Any) -> Any:
    ids, _ = prompts((tokens,))
    cache = kvfold.CompressedCache(model, "snapkv", 40)
    return kvfold.generate(model, ids, cache=cache, max_new_tokens=new, **options)


def test_an_answer_ends_where_learned_positions_end(gpt2: Any) -> None:
    assert learned_positions(gpt2) == LENGTH
    assert answers(gpt2, 60, 5, min_new_tokens=5).shape[1] == 65  # the last token is not read
    with pytest.raises(KvfoldError, match=r"60 tokens and an answer of 6 pass the 64 .*=5 or less"):
        answers(gpt2, 60, 6)


def test_padding_takes_no_position(gpt2: Any) -> None:
    ids, mask = prompts((60, 40))
    wide = torch.nn.functional.pad(ids, (6, 0)), torch.nn.functional.pad(mask, (6, 0))
    cache = kvfold.CompressedCache(gpt2, "snapkv", 40)
    options = {"cache": cache, "max_new_tokens": 5, "min_new_tokens": 5}
    out = kvfold.generate(gpt2, wide[0], attention_mask=wide[1], **options)
    cache = kvfold.CompressedCache(gpt2, "snapkv", 40)
    alone = kvfold.generate(gpt2, ids, attention_mask=mask, **(options | {"cache": cache}))
    assert torch.equal(out[:, 6:], alone)


def test_plain_generate_is_stopped_in_a_line(gpt2: Any) -> None:
    ids, _ = prompts((60,))
    cache = kvfold.CompressedCache(gpt2, "snapkv", 40)
    with pytest.raises(KvfoldError, match=r"65 tokens with its answer, .* positions for 64"):
        gpt2.generate(ids, past_key_values=cache, max_new_tokens=9, min_new_tokens=9)


@pytest.mark.parametrize("beyond", [2, None])
def test_tokens_without_an_embedding_are_named_before_anything_is_read(beyond: int | None) -> None:
    model, tokenizer = kvfold.bundled_model()
    rows = model.get_input_embeddings().num_embeddings
    ids = torch.arange(3, 43)[None]
    token = -100 if beyond is None else rows + beyond  # -100 as in labels
    ids[0, 30] = token
    said = f"token {token} has no embedding, as LlamaForCausalLM has {rows}"
    for chunk in (None, 8):
        cache = kvfold.CompressedCache(model, "knorm", 20)
        with pytest.raises(KvfoldError, match=said):
            kvfold.generate(model, ids, cache=cache, prefill_chunk=chunk, max_new_tokens=2)
        assert cache.get_seq_length() == 0
    cache = kvfold.CompressedCache(model, "knorm", 20)
    with pytest.raises(KvfoldError, match=said):
        model.generate(ids, past_key_values=cache, max_new_tokens=2)
    tokenizer.add_tokens(["<outside>"])
    with pytest.raises(KvfoldError, match="has no embedding"):
        kvfold.compress(model, tokenizer, "One <outside> word. " * 4, "snapkv", 0.5)
    with pytest.raises(KvfoldError, match="has no embedding"):
        kvfold.compress(model, tokenizer, "One word. " * 9, "snapkv", 0.5).ask("<outside>")
