# SPDX-License-Identifier: Apache-2.0
"""A cache goes on only from what it has read: another prompt is refused, or cut back to."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvfold
from kvfold import CompressedCache, KvfoldError
from kvfold.cache.fork import fork
from tests.helpers.models import build, continuation, prompts
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.turns import GREEDY, changed, on, turn

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


@pytest.mark.slow
@pytest.mark.cases(2)
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


@pytest.mark.slow
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
