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
from tests.helpers.truth import Reader, worst

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


@pytest.mark.cases(1)
@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def alone(name: str, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits `[B, S, V]` of an answer to each row by itself, without kvfold."""
    model, lengths = build(name, torch.float64), mask.sum(-1).tolist()
    rows = [ids[i : i + 1, -n:] for i, n in enumerate(lengths)]
    ones = [torch.ones_like(row) for row in rows]
    made = [model.generate(r, attention_mask=m, **GREEDY) for r, m in zip(rows, ones, strict=True)]
    return torch.cat([logits(each) for each in made])


def beside(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left with tokens that are no zeros, and their mask."""
    ids, mask = prompts(lengths)
    return torch.where(mask > 0, ids, 7), mask


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "bamba"])
@pytest.mark.parametrize(("chunk", "compress"), [(20, "at_end"), (3, "at_end"), (20, "per_chunk")])
def test_padded_rows_in_pieces_are_the_rows_alone(name, chunk, compress):
    """Column 20 of 41 would be a forward of its own, and is padding in the shorter row."""
    ids, mask = beside((41, 20))
    model = build(name, torch.float64)
    options = {"cache": CompressedCache(model, "full"), "prefill_chunk": chunk, **GREEDY}
    made = kvfold.generate(model, ids, attention_mask=mask, compress=compress, **options)
    assert worst(logits(made), alone(name, ids, mask)) <= CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "jamba"])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((9, 8), {"prefill_chunk": 1}),
        ((5, 1), {"prefill_chunk": 2}),  # columns 2, 1 and 2: the one is padding
        ((9, 5), {"prefill_chunk": 1, "compress": "per_chunk"}),
    ],
)
def test_padding_in_a_forward_of_one_column_is_refused(name, lengths, options):
    ids, mask = beside(lengths)
    model = build(name)
    cache = CompressedCache(model, "full")
    with pytest.raises(KvfoldError, match=r"take padding for tokens|would not skip padding"):
        kvfold.generate(model, ids, cache=cache, attention_mask=mask, **options, **GREEDY)
    assert cache.get_seq_length() == 0


def test_two_columns_cannot_be_read_but_for_the_last():
    """KVzip reads all but the last token by itself: a column that is padding in the second row."""
    model, (ids, mask) = build("qwen3_5"), beside((2, 1))
    cache = CompressedCache(model, "kvzip", 1.0, tokenizer=word_tokenizer())
    with pytest.raises(KvfoldError, match="take padding for tokens"):
        kvfold.generate(model, ids, cache=cache, attention_mask=mask, **GREEDY)
    assert cache.get_seq_length() == 0


def test_padding_in_later_pieces_of_tokens_one_by_one_is_refused():
    model, (ids, mask) = build("jamba"), beside((41, 3))
    cache = CompressedCache(model, "full")
    options = {"prefill_chunk": 20, "compress": "per_chunk", **GREEDY}
    with pytest.raises(KvfoldError, match="would not skip padding"):
        kvfold.generate(model, ids, cache=cache, attention_mask=mask, **options)
    assert cache.get_seq_length() == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "bamba", "jamba"])
def test_own_forwards_of_a_padded_column_are_refused(name):
    ids, mask = beside((12, 5))
    model = build(name, torch.float64)
    reader = Reader(model, CompressedCache(model, "full"), mask[:, :6])
    reader(ids[:, :6])
    with pytest.raises(KvfoldError, match="two columns or more"):
        reader.mask = mask[:, :7]
        reader.started = False
        reader(ids[:, 6:7])
    assert reader.cache.get_seq_length() == 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "bamba"])
def test_own_forwards_of_more_columns_or_of_tokens_are_the_rows_alone(name):
    ids, mask = beside((12, 5))
    model = build(name, torch.float64)
    reader = Reader(model, CompressedCache(model, "full"))
    for begin, end in ((0, 4), (4, 6), (6, 9), (9, 10), (10, 12)):
        reader.mask, reader.started = mask[:, :end], False
        last = reader(ids[:, begin:end])[:, -1]
    assert worst(last, alone(name, ids, mask)[:, 0]) <= CLOSE


@pytest.mark.parametrize("name", ["qwen3_5", "bamba"])
def test_masks_of_four_dimensions_are_refused_where_they_hide_padding(name):
    """Recurrent layers do not see them."""
    ids, mask = beside((12, 5))
    model, causal = build(name), torch.ones(12, 12).tril().bool()
    cache = CompressedCache(model, "full")
    with pytest.raises(KvfoldError, match=r"mask \[B, N\]"):
        model(ids, attention_mask=causal & mask[:, None, None].bool(), past_key_values=cache)
    assert cache.get_seq_length() == 0
    model(ids, attention_mask=causal[None, None], past_key_values=cache)
    assert cache.get_seq_length() == 12
