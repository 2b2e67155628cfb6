# SPDX-License-Identifier: Apache-2.0
"""Models that read images or sound: stock with budget to spare, masked dense after eviction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import CompressedCache, KvfoldError, UnsupportedModel
from tests.helpers.caches import BATCHES
from tests.helpers.image_models import (
    FAMILIES,
    FIRST,
    IMAGE,
    TOKENS,
    build,
    features_of,
    prompt,
    row,
)
from tests.helpers.models import continuation
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import MaskedDense, Reader, stock_cache, worst

SPEC = "snapkv:window=8"
GREEDY = {
    "do_sample": False,
    "max_new_tokens": 6,
    "return_dict_in_generate": True,
    "output_logits": True,
}
EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)


def logits(made: Any) -> Tensor:
    """Logits `[B, S, V]` of generated tokens."""
    return torch.stack(made.logits, 1)


def without(given: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {k: v for k, v in given.items() if k not in names}


@pytest.mark.slow
@pytest.mark.cases(2)
@BATCHES
@EVERY_FAMILY
def test_with_budget_to_spare_a_first_turn_with_an_image_is_stock(name, lengths):
    given, model = prompt(name, lengths), build(name)
    expected = logits(model.generate(**given, **GREEDY))
    features = features_of(name)
    blank = given | {features: torch.zeros_like(given[features])}
    assert worst(logits(build(name).generate(**blank, **GREEDY)), expected) > 0.3
    cache = CompressedCache(model, SPEC, 1.0)
    assert torch.equal(logits(kvfold.generate(model, cache=cache, **given, **GREEDY)), expected)
    cache = CompressedCache(model, SPEC, 1.0)
    made = model.generate(past_key_values=cache, **given, **GREEDY)
    assert torch.equal(logits(made), expected)


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("spec", [SPEC, "pyramidkv:window=8", "h2o", "streaming_llm_original"])
@BATCHES
@EVERY_FAMILY
def test_after_eviction_text_and_images_are_masked_dense(name, lengths, spec):
    given, model = prompt(name, lengths), build(name)
    ids, mask = given["input_ids"], given["attention_mask"]
    inputs = without(given, "input_ids", "attention_mask")
    truth, cache = MaskedDense(build(name)), CompressedCache(model, spec, 20)
    plain = Reader(build(name), stock_cache(model))
    readers = [truth, Reader(model, cache), plain]
    for reader in readers:
        reader(ids, attention_mask=mask, **inputs)
    truth.hide(cache)
    off, effect = [], []
    for step in [*continuation(len(ids), 5).split(1, 1), continuation(len(ids), 9, seed=4)]:
        mask = torch.cat([mask, torch.ones_like(step)], 1)
        inputs = {"attention_mask": mask}
        if name == "qwen2_5_vl":  # an image of 2 × 2 tokens takes as many positions as it is wide
            places = (mask.cumsum(-1) - 1)[:, -step.shape[1] :] - 2
            inputs["position_ids"] = places.expand(3, -1, -1)
        expected, got, everything = (reader(step, **inputs) for reader in readers)
        off.append(worst(got, expected))
        effect.append(worst(everything, expected))
        truth.hide(cache)  # H2O evicts at every step
    assert max(off) <= 1e-6
    assert min(effect) > 0.05


@pytest.mark.slow
@pytest.mark.cases(2)
@EVERY_FAMILY
def test_encoded_entries_of_an_image(name):
    """Unencoded residuals give stock logits; those of 8 bits are near, those of 2 bits farther."""
    given, model, off = prompt(name, (64,)), build(name), []
    step = {"attention_mask": torch.ones(1, 65, dtype=torch.long)}
    if name == "qwen2_5_vl":
        step["position_ids"] = torch.full((3, 1, 1), 62)
    inputs = without(given, "input_ids")
    plain = Reader(build(name), stock_cache(model))
    plain(given["input_ids"], **inputs)
    expected = plain(continuation(1, 1), **step)
    for options in (
        "group=16,residual=128",
        "bits=8,group=16,residual=16",
        "bits=2,group=16,residual=16",
    ):
        reader = Reader(model, CompressedCache(model, f"kivi:{options}"))
        reader(given["input_ids"], **inputs)
        off.append(worst(reader(continuation(1, 1), **step), expected))
    assert off[0] == 0 < off[1] < 0.1 < off[2]


@pytest.mark.cases(2)
@EVERY_FAMILY
def test_an_enabled_model_reads_an_image_as_an_explicit_cache(name):
    given, model = prompt(name), build(name)
    expected = kvfold.generate(model, cache=CompressedCache(model, SPEC, 20), **given, **GREEDY)
    with kvfold.enable(model, SPEC, 20):
        for _ in range(2):
            made = model.generate(**given, **GREEDY)
            assert torch.equal(logits(made), logits(expected))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["kvzip", "pyramidinfer"])
@EVERY_FAMILY
def test_methods_with_forwards_of_their_own_refuse_an_image(name, spec):
    model, budget = build(name), 40 if spec == "kvzip" else None
    cache = CompressedCache(model, spec, budget, tokenizer=word_tokenizer())
    reason = rf"^{features_of(name)}.* and {spec} runs forwards of its own .* another method$"
    with pytest.raises(KvfoldError, match=reason):
        kvfold.generate(model, cache=cache, **prompt(name), **GREEDY)
    assert cache.get_seq_length() == 0


@pytest.mark.cases(2)
@EVERY_FAMILY
def test_a_padded_row_with_an_image_is_the_row_alone(name):
    given, model = prompt(name), build(name)
    together = kvfold.generate(model, cache=CompressedCache(model, SPEC, 20), **given, **GREEDY)
    for index, expected in enumerate(logits(together)):
        alone = row(given, index)
        made = kvfold.generate(model, cache=CompressedCache(model, SPEC, 20), **alone, **GREEDY)
        assert worst(logits(made)[0], expected) <= 1e-6


@EVERY_FAMILY
def test_an_image_is_not_read_in_pieces(name):
    given, model = prompt(name), build(name)
    cache = CompressedCache(model, SPEC, 20)
    with pytest.raises(KvfoldError, match=rf"{features_of(name)}.*leave out prefill_chunk="):
        kvfold.generate(model, cache=cache, prefill_chunk=10, **given, **GREEDY)
    assert cache.get_seq_length() == 0


@pytest.mark.slow
@EVERY_FAMILY
def test_tokens_of_an_image_can_be_protected(name):
    given, model = prompt(name, (64,)), build(name)
    span = (FIRST, FIRST + TOKENS)
    cache = CompressedCache(model, SPEC, 20, protect=[span])
    kvfold.generate(model, cache=cache, **given, **GREEDY)
    for layer in range(len(cache.states)):
        for head in cache.positions(layer)[0]:
            assert set(range(*span)) <= set(head.tolist())


@pytest.mark.slow
@pytest.mark.cases(2)
@pytest.mark.parametrize("chunk", [None, 4])
@BATCHES
@EVERY_FAMILY
def test_a_chat_about_an_image_goes_on_after_other_texts(name, lengths, chunk):
    """A model may keep one text's offset of positions, that of the image it has read last."""
    given, model = prompt(name, lengths), build(name)
    caches = [CompressedCache(model, "full") for _ in range(2)]
    first = kvfold.generate(model, cache=caches[0], **given, **GREEDY).sequences
    other = continuation(2, 40, seed=5)
    kvfold.generate(model, other, cache=caches[1], max_new_tokens=2)
    CompressedCache(build(name), SPEC, 20)
    ids = torch.cat([first, continuation(len(first), 9)], 1)
    new = torch.ones(len(ids), ids.shape[1] - 64, dtype=torch.long)
    mask = torch.cat([given["attention_mask"], new], 1)
    inputs = without(given, "input_ids", "attention_mask")
    for kinds in ("mm_token_type_ids", "token_type_ids"):
        if kinds in inputs:
            inputs[kinds] = (ids == IMAGE).long()
    whole = build(name).generate(input_ids=ids, attention_mask=mask, **inputs, **GREEDY)
    options = {"attention_mask": mask, "prefill_chunk": chunk, **GREEDY}
    made = kvfold.generate(model, ids, cache=caches[0], **options)
    assert worst(logits(made), logits(whole)) <= 1e-6


@pytest.mark.cases(2)
@EVERY_FAMILY
def test_a_later_turn_takes_its_own_images(name):
    """Or refuses them, where the model counts positions from those of all turns."""
    given, model = prompt(name, (64,)), build(name)
    features = without(given, "input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
    cache = CompressedCache(model, "full")
    first = kvfold.generate(model, cache=cache, **given, **GREEDY).sequences
    ids = torch.cat([first, given["input_ids"]], 1)
    both = {key: torch.cat([value, value]) for key, value in features.items()}
    kinds = {key: (ids == IMAGE).long() for key in given if key.endswith("token_type_ids")}
    whole = build(name).generate(ids, **both, **kinds, **GREEDY)
    again = r"a later turn takes what belongs to its own tokens: leave out what has been read"
    counted = r"counts positions from all images of a conversation"
    with pytest.raises(KvfoldError, match=f"(?i){counted if name == 'qwen2_5_vl' else again}"):
        kvfold.generate(model, ids, cache=cache, **both, **kinds, **GREEDY)
    if name == "qwen2_5_vl":
        with pytest.raises(KvfoldError, match=counted):
            kvfold.generate(model, ids, cache=cache, **features, **kinds, **GREEDY)
    else:
        made = kvfold.generate(model, ids, cache=cache, **features, **kinds, **GREEDY)
        assert worst(logits(made), logits(whole)) <= 1e-6


MOVING = ("streaming_llm", "finch:window=8", "snapkv:window=8 + reindex")


@pytest.mark.parametrize("spec", MOVING)
def test_keys_after_an_image_are_not_moved_by_columns(spec):
    """M-RoPE gives an image fewer positions than columns; texts, and other families, go on."""
    model, given = build("qwen2_5_vl"), prompt("qwen2_5_vl", (64,))
    features, words = without(given, "input_ids"), continuation(1, 64)
    plain, inputs = CompressedCache(model, spec, 20), {"attention_mask": torch.ones_like(words)}
    kvfold.generate(model, words, cache=plain, **inputs, **GREEDY)
    embeds = {"inputs_embeds": model.get_input_embeddings()(words)}
    cache = CompressedCache(model, spec, 20)
    for refused in (given, embeds):
        with pytest.raises(UnsupportedModel, match=r"fewer positions than columns.*another method"):
            model(past_key_values=cache, **refused)
        assert cache.get_seq_length() == 0
    kept = CompressedCache(model, SPEC, 20)
    with (
        pytest.raises(UnsupportedModel, match="fewer positions than columns"),
        kept.reading(),
    ):
        model(given["input_ids"], past_key_values=kept, **features)
        kept.to_budget(20, "snapkv:window=8 + reindex")
    other = build("llava")
    cache = CompressedCache(other, spec, 20)
    kvfold.generate(other, cache=cache, **prompt("llava", (64,)), **GREEDY)


@pytest.mark.slow
def test_a_text_with_an_image_is_not_edited_by_columns():
    model, words = build("qwen2_5_vl"), continuation(1, 64)
    cache = CompressedCache(model, SPEC, 20)
    kvfold.generate(model, cache=cache, **prompt("qwen2_5_vl", (64,)), **GREEDY)
    before = cache.get_seq_length()
    new = torch.tensor([[3, 4]])
    for edit in (lambda: cache.drop((60, 62)), lambda: cache.replace((60, 62), new)):
        with pytest.raises(
            UnsupportedModel, match=r"fewer positions than columns.*read the edited"
        ):
            edit()
    assert cache.get_seq_length() == before
    plain = CompressedCache(model, SPEC, 20)
    kvfold.generate(model, words, cache=plain, **GREEDY)
    plain.drop((60, 62))
    assert plain.get_seq_length() == 64 + GREEDY["max_new_tokens"] - 1 - 2


def test_a_cache_can_be_made_after_a_batch_with_images():
    """The trial of a model begins a text of its own, and leaves the offset of the last one."""
    model, given = build("qwen2_5_vl"), prompt("qwen2_5_vl")
    model.generate(**given, max_new_tokens=1)
    before = model.model.rope_deltas
    CompressedCache(model, SPEC, 20)
    assert model.model.rope_deltas is before


@pytest.mark.cases(2)
@EVERY_FAMILY
def test_tokens_of_an_image_have_a_budget_of_their_own(name):
    """By the score alone the image loses more, or less, than its share."""
    given = prompt(name, (64,))
    ((start, stop),) = kvfold.image_spans(build(name), given["input_ids"])
    assert (start, stop) == (FIRST, FIRST + TOKENS)
    budget, found = 32, {}
    for spec in (SPEC, f"{SPEC} + fair:spans={start}/{stop}"):
        model, inputs = build(name), without(given, "input_ids")
        cache = CompressedCache(model, spec, budget)
        truth = MaskedDense(build(name))
        readers = [truth, Reader(model, cache)]
        for reader in readers:
            reader(given["input_ids"], **inputs)
        truth.hide(cache)
        heads = [head.tolist() for i in range(len(cache.states)) for head in cache.positions(i)[0]]
        found[spec] = [sum(start <= place < stop for place in head) for head in heads]
        assert {len(head) for head in heads} == {budget}
        step, mask = continuation(1, 1), torch.ones(1, 65, dtype=torch.long)
        placed = {"attention_mask": mask}
        if name == "qwen2_5_vl":
            placed["position_ids"] = torch.full((3, 1, 1), 62)
        expected, got = (reader(step, **placed) for reader in readers)
        assert worst(got, expected) <= 1e-6
    assert set(found[f"{SPEC} + fair:spans={start}/{stop}"]) == {budget * TOKENS // 64}
    assert set(found[SPEC]) != {budget * TOKENS // 64}


def test_images_are_found_in_one_prompt_of_a_model_that_reads_them():
    model, ids = build("qwen2_5_vl"), torch.tensor([[5, IMAGE, IMAGE, 6, IMAGE]])
    assert kvfold.image_spans(model, ids) == [(1, 3), (4, 5)]
    assert kvfold.image_spans(model, ids[0]) == [(1, 3), (4, 5)]
    assert kvfold.image_spans(model, ids[:, :1]) == []
    with pytest.raises(KvfoldError, match="one row"):
        kvfold.image_spans(model, ids.expand(2, -1))
    with pytest.raises(KvfoldError, match="no token for images or sound"):
        kvfold.image_spans(kvfold.bundled_model()[0], ids)
