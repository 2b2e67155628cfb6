# SPDX-License-Identifier: Apache-2.0
"""A cache goes on only from what it has read: another prompt is refused, or cut back to."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvfold
from kvfold import CompressedCache, KvfoldError
from kvfold.cache.fork import fork
from kvfold.hf import versions
from tests.helpers.longrope import longrope, notices_drops
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
SPECS = [
    ("full", None),
    ("snapkv:window=8", 20),
    ("streaming_llm", 20),
    ("h2o", 20),
    ("adakv:window=8", 20),
    ("kivi:group=8,residual=8", None),
    ("simlayerkv:window=8", None),
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("llama")


def turn(model: PreTrainedModel, cache: CompressedCache, ids: Tensor, **options: Any) -> Tensor:
    """The conversation `[B, N]` after one more answer."""
    out: Tensor = kvfold.generate(model, ids, cache=cache, **(GREEDY | options))
    return out


def changed(ids: Tensor, row: int, column: int) -> Tensor:
    """`ids [B, N]` with another token in one place."""
    other = ids.clone()
    other[row, column] = 3 if ids[row, column] != 3 else 4
    return other


def on(ids: Tensor, length: int = 7) -> Tensor:
    """A conversation that goes on with another message."""
    return torch.cat([ids, continuation(len(ids), length, seed=9)], 1)


@pytest.mark.parametrize(("spec", "budget"), SPECS)
@pytest.mark.parametrize("column", [0, 30, 63, 64, 68])
def test_another_text_is_refused_where_it_parts_and_the_cache_goes_on(model, spec, budget, column):
    """Columns 64 and on were generated: an answer that a template renders anew parts there."""
    cache, expected = (CompressedCache(model, spec, budget) for _ in range(2))
    said = turn(model, cache, prompts((64,))[0])
    assert torch.equal(said, turn(model, expected, prompts((64,))[0]))
    with pytest.raises(KvfoldError, match=rf"at {column}\b.*new cache"):
        turn(model, cache, changed(on(said), 0, column))
    assert torch.equal(turn(model, cache, on(said)), turn(model, expected, on(said)))


def test_a_prompt_of_any_length_is_compared(model):
    cache = CompressedCache(model, "full")
    turn(model, cache, prompts((40,))[0])
    for length in (30, 90):
        with pytest.raises(KvfoldError, match="another text"):
            turn(model, cache, prompts((length,), seed=5)[0])


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("compress", ["at_end", "per_chunk"])
def test_rows_of_a_padded_batch_are_compared_without_their_padding(model, chunk, compress):
    if compress == "per_chunk" and chunk is None:
        chunk = 64
    ids, mask = prompts()
    cache = CompressedCache(model, "snapkv:window=8", 20)
    said = turn(model, cache, ids, attention_mask=mask, prefill_chunk=chunk, compress=compress)
    longer, ones = on(said), torch.ones(3, 13, dtype=torch.long)
    whole = torch.cat([mask, ones], 1)
    for row, column in ((0, 0), (1, 11), (2, 40), (2, 66)):
        with pytest.raises(KvfoldError, match=rf"row {row}, column {column}\b"):
            turn(model, cache, changed(longer, row, column), attention_mask=whole)
    moved = whole.clone()
    moved[1, 10] = 1  # what was read as padding
    with pytest.raises(KvfoldError, match="row 1, column 10"):
        turn(model, cache, longer, attention_mask=moved)
    turn(model, cache, changed(longer, 1, 4), attention_mask=whole)  # the id of a padding column


def test_another_number_of_rows_is_refused(model):
    cache = CompressedCache(model, "full")
    turn(model, cache, prompts((40,))[0])
    with pytest.raises(KvfoldError, match="1 rows and the prompt has 2"):
        turn(model, cache, on(prompts((46, 46))[0]))


def saved_and_loaded(cache: CompressedCache) -> CompressedCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    loaded: CompressedCache = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, fork])
def test_copies_go_on_from_texts_of_their_own(model, copied):
    cache = CompressedCache(model, "full")
    said = turn(model, cache, prompts((40,))[0])
    other, elsewhere = copied(cache), changed(on(said), 0, said.shape[1])
    for each in (cache, other):
        with pytest.raises(KvfoldError, match=r"at 41\b"):
            turn(model, each, changed(on(said), 0, 41))
    turn(model, other, elsewhere)
    turn(model, cache, on(said))
    for each, text in ((cache, elsewhere), (other, on(said))):
        with pytest.raises(KvfoldError, match=rf"at {said.shape[1]}\b"):
            turn(model, each, on(text))


def test_a_pickled_cache_knows_what_was_read(model):
    cache, file = CompressedCache(model, "full"), io.BytesIO()
    said = turn(model, cache, prompts((40,))[0])
    torch.save(cache, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with pytest.raises(KvfoldError, match=r"at 41\b"):
        turn(model, loaded, changed(on(said), 0, 41))


def test_what_was_taken_back_is_forgotten(model):
    cache, fresh = CompressedCache(model, "full"), CompressedCache(model, "full")
    said = turn(model, cache, prompts((40,))[0])
    cache.crop(-3)
    other = changed(on(said), 0, 43)
    assert torch.equal(turn(model, cache, other), turn(model, fresh, other))


def test_a_loaded_context_knows_its_tokens(model, tmp_path):
    tokenizer = word_tokenizer()
    model.config.vocab_size, before = len(tokenizer), model.config.vocab_size
    try:
        context = kvfold.compress(model, tokenizer, "sky sea " * 20, "snapkv:window=8", 20)
        context.save(tmp_path / "a.kvfold")
        loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    finally:
        model.config.vocab_size = before
    for each in (context, loaded):
        with pytest.raises(KvfoldError, match=r"at 5\b"):
            turn(model, each.cache, changed(on(context.ids), 0, 5))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk": 16},
        {"do_sample": True},
        {"num_beams": 3},
        {"num_beams": 3, "prefill_chunk": 16},
        {"do_sample": True, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_ids_are_those_of_the_stored_keys(model, options):
    """A stock cache that reads the noted ids holds the same keys, also after beams."""
    cache = CompressedCache(model, "full")
    turn(model, cache, prompts((40,))[0], **options)
    ids = cache.phase.history.whole()
    assert ids is not None and ids.shape[1] == cache.get_seq_length()
    stock = DynamicCache()
    with torch.no_grad():
        model(ids.long(), past_key_values=stock)
    for mine, theirs in zip(cache.layers, stock.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, atol=2e-5, rtol=0)


def test_an_answer_that_broke_off_is_known_as_far_as_it_was_read(model):
    def stop(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == 43:
            raise RuntimeError("interrupted")
        return scores

    ids, cache = prompts((40,))[0], CompressedCache(model, "full")
    said = turn(model, CompressedCache(model, "full"), ids)
    with pytest.raises(RuntimeError, match="interrupted"):
        turn(model, cache, ids, logits_processor=[stop])
    with pytest.raises(KvfoldError, match=r"at 42\b"):
        turn(model, cache, changed(on(said), 0, 42))
    assert torch.equal(
        turn(model, cache, on(said)), turn(model, CompressedCache(model, "full"), on(said))
    )


@torch.no_grad()
def test_what_bare_forwards_read_is_known(model):
    ids, cache = prompts((40,))[0], CompressedCache(model, "full")
    said = model.generate(ids, past_key_values=cache, **GREEDY)[:, :-1]  # its last is not read
    more = continuation(1, 70, seed=6)  # more than are noted apart
    for token in more.split(1, 1):
        model(token, past_key_values=cache)
    whole = on(torch.cat([said, more], 1))
    for column in (5, 43, 60, 114):
        with pytest.raises(KvfoldError, match=rf"at {column}\b"):
            turn(model, cache, changed(whole, 0, column))
    turn(model, cache, whole)


@torch.no_grad()
def test_what_had_no_ids_is_taken_as_given(model):
    ids, cache = prompts((40,))[0], CompressedCache(model, "full")
    model(inputs_embeds=model.get_input_embeddings()(ids), past_key_values=cache)
    model(continuation(1, 3), past_key_values=cache)
    whole = torch.cat([ids, continuation(1, 3)], 1)
    fresh = turn(model, CompressedCache(model, "full"), on(whole))
    assert torch.equal(turn(model, cache, on(whole)), fresh)


# --- reuse="prefix" ---------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["full", "snapkv:window=8", "streaming_llm", "tova", "adakv"])
@pytest.mark.parametrize("column", [0, 20, 42])
def test_a_cache_that_evicted_nothing_goes_back_to_the_shared_prefix(model, spec, column):
    budget = None if spec == "full" else 70
    cache = CompressedCache(model, spec, budget)
    edited = changed(on(turn(model, cache, prompts((40,))[0]), 60), 0, column)
    fresh = CompressedCache(model, spec, budget)
    expected = turn(model, fresh, edited, output_logits=True, return_dict_in_generate=True)
    out = turn(
        model, cache, edited, reuse="prefix", output_logits=True, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(expected.logits))
    for layer in range(len(cache.states)):
        for one, other in zip(cache.positions(layer)[0], fresh.positions(layer)[0], strict=True):
            assert torch.equal(one, other)


def test_an_answer_is_given_again(model):
    """The prompt itself, once more: its last token is read anew."""
    ids, cache = prompts((40,))[0], CompressedCache(model, "full")
    said = turn(model, cache, ids)
    with pytest.raises(KvfoldError, match="at least one new token"):
        turn(model, cache, ids)
    assert torch.equal(turn(model, cache, ids, reuse="prefix"), said)


@pytest.mark.parametrize("spec", ["snapkv:window=8", "h2o", "kivi:group=8,residual=8"])
def test_an_eviction_is_not_taken_back(model, spec):
    budget = None if spec.startswith("kivi") else 20
    cache, expected = (CompressedCache(model, spec, budget) for _ in range(2))
    said = turn(model, cache, prompts((64,))[0])
    turn(model, expected, prompts((64,))[0])
    with pytest.raises(KvfoldError, match="since"):
        turn(model, cache, changed(on(said), 0, 40), reuse="prefix")
    assert torch.equal(turn(model, cache, on(said)), turn(model, expected, on(said)))


def test_attention_that_was_added_up_is_not_taken_back(model):
    """Nothing is evicted yet, but sums hold what the tokens to be taken back attended to."""
    cache = CompressedCache(model, "h2o", 100)
    said = turn(model, cache, prompts((40,))[0])
    with pytest.raises(KvfoldError, match="scored"):
        turn(model, cache, changed(on(said), 0, 30), reuse="prefix")


def test_nothing_in_common_starts_anew_even_after_an_eviction(model):
    cache, ids = CompressedCache(model, "snapkv:window=8", 20), prompts((64,), seed=7)[0]
    turn(model, cache, prompts((64,))[0])
    out = turn(model, cache, ids, reuse="prefix")
    assert torch.equal(out, turn(model, CompressedCache(model, "snapkv:window=8", 20), ids))


def test_only_a_prefix_can_be_reused(model):
    with pytest.raises(KvfoldError, match='"prefix"'):
        turn(model, CompressedCache(model, "full"), prompts((40,))[0], reuse="suffix")


def test_a_block_that_keeps_what_there_is_is_not_started_anew(model):
    cache = CompressedCache(model, "full")
    turn(model, cache, prompts((40,))[0])
    for block in (cache.frozen, cache.reading):
        with block(), pytest.raises(KvfoldError, match="cannot start anew"):
            turn(model, cache, prompts((50,), seed=7)[0], reuse="prefix")
    assert cache.get_seq_length() == 45


def test_a_prompt_that_a_method_reads_by_itself_is_read_by_it_again():
    """KVzip repeats a first prompt only, also one that begins as another did."""
    model, tokenizer = kvfold.bundled_model()
    one, other = (
        tokenizer(text * 30, return_tensors="pt").input_ids for text in ("Here. ", "We. ")
    )
    other = torch.cat([one[:, :4], other], 1)
    cache, fresh = (CompressedCache(model, "kvzip", 60, tokenizer=tokenizer) for _ in range(2))
    turn(model, cache, one[:, :40])
    out = turn(model, cache, other, reuse="prefix")
    assert torch.equal(out, turn(model, fresh, other))
    assert cache.stats().kept == fresh.stats().kept


def test_a_call_that_is_refused_takes_nothing_back(model, monkeypatch):
    """Whatever refuses it: the cache goes on as if the call had not been made."""
    cache, expected = (CompressedCache(model, "full") for _ in range(2))
    said = turn(model, cache, prompts((40,))[0])
    turn(model, expected, prompts((40,))[0])
    monkeypatch.setattr(versions, "ASSISTED_FROM", Version("99"))
    places = {"position_ids": torch.arange(52)[None]}
    several = {"do_sample": True, "num_return_sequences": 2, **places}
    pieces = {"prefill_chunk": 8, **places}
    assisted = {"prompt_lookup_num_tokens": 3}
    for column, options in ((20, several), (20, pieces), (0, pieces), (0, assisted)):
        with pytest.raises(KvfoldError, match=r"must reach|transformers 99"):
            turn(model, cache, changed(on(said), 0, column), reuse="prefix", **options)
        assert cache.stats() == expected.stats()
    assert torch.equal(turn(model, cache, on(said)), turn(model, expected, on(said)))


def test_a_piecewise_reading_that_a_method_refuses_takes_nothing_back(model):
    cache, expected = (CompressedCache(model, "pyramidinfer") for _ in range(2))
    said = turn(model, cache, prompts((40,))[0])
    turn(model, expected, prompts((40,))[0])
    with pytest.raises(KvfoldError, match="in one piece"):
        turn(model, cache, changed(on(said), 0, 20), reuse="prefix", prefill_chunk=8)
    assert cache.stats() == expected.stats()
    assert torch.equal(turn(model, cache, on(said)), turn(model, expected, on(said)))


@notices_drops
def test_a_length_that_a_model_cannot_cross_takes_nothing_back():
    model = longrope()
    cache = CompressedCache(model, "full")
    said = turn(model, cache, prompts((20,))[0])
    with pytest.raises(KvfoldError, match="32 tokens"):
        turn(model, cache, changed(on(said, 4), 0, 10), reuse="prefix", max_new_tokens=8)
    assert cache.get_seq_length() == 25
