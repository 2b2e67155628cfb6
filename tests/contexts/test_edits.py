# SPDX-License-Identifier: Apache-2.0
"""Edited documents: facts dropped, replaced, appended and joined, and the entries behind them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kvfold
from kvfold import Context, KvfoldError
from kvfold.contexts.edits import opening_of
from kvfold.generation.reading import read_turn
from tests.helpers.caches import bits, positions
from tests.helpers.chats import compressed
from tests.helpers.contexts import KIVI, new_model
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader, rotated, stock_cache, worst

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "One of the special magic numbers for {} is: {}. "
QUESTION = "What is the special magic number for {} mentioned in the provided text?"
BELL, RIVER, LAKE = "soft-bell", "calm-river", "deep-lake"
NUMBERS = {BELL: "2241461", RIVER: "8305127", LAKE: "5190736"}


@pytest.fixture(scope="module")
def bundled() -> Any:
    return kvfold.bundled_model()


def text_of(*keys: str) -> str:
    return NOISE * 5 + "".join(NEEDLE.format(key, NUMBERS[key]) + NOISE * 5 for key in keys)


def answer(context: Context, key: str) -> str:
    return context.ask(QUESTION.format(key), max_new_tokens=32)


def knows(context: Context, *keys: str) -> bool:
    return all(NUMBERS[key] in answer(context, key) for key in keys)


def entries_of(context: Context) -> int:
    return sum(n for layer in context.stats().kept for row in layer for n in row)


def heads_of(context: Context) -> int:
    return sum(len(row) for layer in context.stats().kept for row in layer)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["splice", "reread"])
@pytest.mark.parametrize(("method", "budget"), [("full", None), ("kvzip", 0.3)])
def test_a_dropped_fact_is_not_answered_and_others_are(bundled, method, budget, mode):
    context = kvfold.compress(*bundled, text_of(BELL, RIVER, LAKE), method, budget)
    assert knows(context, BELL, RIVER, LAKE)

    edited = context.drop(context.span(NEEDLE.format(RIVER, NUMBERS[RIVER])), mode=mode)

    assert knows(edited, BELL, LAKE) and not knows(edited, RIVER)
    assert knows(context, RIVER)  # the old one stays
    assert edited.cache.get_seq_length() == edited.ids.shape[1] < context.ids.shape[1]


@pytest.mark.parametrize("mode", ["splice", "reread"])
def test_a_replaced_fact_is_not_answered_as_before(bundled, mode):
    """Spliced, later entries remember the old number: the answer may mix both."""
    context = kvfold.compress(*bundled, text_of(BELL, RIVER), "kvzip", 0.3)
    span = context.span(NEEDLE.format(BELL, NUMBERS[BELL]))
    edited = context.replace(span, NEEDLE.format(BELL, "4816273"), mode=mode)
    found = answer(edited, BELL)
    assert ("4816" if mode == "splice" else "4816273") in found and NUMBERS[BELL] not in found
    assert knows(edited, RIVER)


def test_rereading_is_compressing_the_edited_text(bundled):
    context = kvfold.compress(*bundled, text_of(BELL, RIVER), "kvzip", 0.3)
    edited = context.drop(context.span(NEEDLE.format(RIVER, NUMBERS[RIVER])), mode="reread")
    model, tokenizer = bundled
    fresh = kvfold.CompressedCache(model, "kvzip", 0.3, tokenizer=tokenizer)
    length = edited.ids.shape[1]
    read_turn(model, fresh, edited.ids, None, length, length)
    for mine, theirs in zip(bits(edited.cache), bits(fresh), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("method", ["snapkv", "kvzip"])
def test_documents_are_read_again_in_pieces(method):
    """A long document's attention need not fit into one forward."""
    model, tokenizer = new_model(), word_tokenizer()
    context = compressed(model, tokenizer, method)
    lengths: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(
        lambda _, given, __: lengths.append(given[0].shape[1])
    )
    pieces = [
        context.drop((20, 30), "reread", prefill_chunk=7),
        context.replace((20, 30), "the sky", "reread", prefill_chunk=7),
        context.append("the sky is blue and the grass is green", prefill_chunk=7),
    ]
    handle.remove()
    assert method == "kvzip" or max(lengths) == 7  # KVzip's own forwards have a length of their own
    whole = [
        context.drop((20, 30), "reread"),
        context.replace((20, 30), "the sky", "reread"),
        context.append("the sky is blue and the grass is green"),
    ]
    for one, other in zip(pieces, whole, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert positions(one.cache) == positions(other.cache)
        for mine, theirs in zip(bits(one.cache), bits(other.cache), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    for edit in (context.drop, lambda span, mode, **given: context.append("the sky", **given)):
        for none in (0, -7):
            with pytest.raises(KvfoldError, match=f"a positive number of tokens, not {none}"):
                edit((20, 30), "reread", prefill_chunk=none)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(("method", "budget"), [("full", None), ("snapkv", 0.5), ("kvzip", 0.5)])
def test_appended_text_is_answered_too(bundled, method, budget):
    context = kvfold.compress(
        *bundled, text_of(BELL), "full" if budget is None else "kvzip", budget
    )
    longer = context.append(text_of(RIVER))
    assert knows(longer, BELL, RIVER) and not knows(context, RIVER)


@pytest.mark.parametrize(("method", "budget"), [("full", None), ("kvzip", 0.5), ("knorm", 0.7)])
def test_joined_documents_answer_for_each(bundled, method, budget):
    keys = (BELL, RIVER, LAKE) if method == "full" else (BELL, RIVER)
    parts = [kvfold.compress(*bundled, text_of(key), method, budget) for key in keys]
    whole = kvfold.join(parts)
    openings = sum(map(opening_of, parts[1:]))
    assert whole.ids.shape[1] == sum(part.ids.shape[1] for part in parts) - openings
    if method != "knorm":
        assert knows(whole, *keys)
    alone, openings = sum(map(entries_of, parts)), openings * heads_of(whole)
    assert alone - openings <= entries_of(whole) <= alone


@pytest.mark.parametrize("spec", ["full", "snapkv", "adakv", "kvzip"])
def test_joined_entries_are_those_of_a_dense_cache_joined_by_hand(spec):
    model, tokenizer = new_model().double(), word_tokenizer()
    first, second = (compressed(model, tokenizer, spec) for _ in range(2))
    opening, length = opening_of(second), first.ids.shape[1]
    whole = kvfold.join([first, second])
    dense = [Reader(model, stock_cache(model)) for _ in range(2)]
    for reader, context in zip(dense, (first, second), strict=True):
        reader(context.ids)
    for place, state in enumerate(whole.cache.states):
        one, other = (reader.cache.layers[place] for reader in dense)
        by = torch.full((1, 1, 1), length - opening)
        keys = torch.cat([one.keys, rotated(other.keys[:, :, opening:], by)], 2)
        values = torch.cat([one.values, other.values[:, :, opening:]], 2)
        columns, (mine, own) = state.columns(), state.stored().dense()
        for head in range(columns.shape[1]):
            kept = columns[0, head] >= 0
            at = columns[0, head][kept]
            held = [*first.cache.positions(place)[0][head].tolist()]
            held += [
                p - opening + length
                for p in second.cache.positions(place)[0][head].tolist()
                if p >= opening
            ]
            assert at.tolist() == held
            assert worst(mine[0, head][kept], keys[0, head][at]) < 1e-5
            assert worst(own[0, head][kept], values[0, head][at]) < 1e-9


def test_of_levelled_documents_a_joined_one_has_no_single_set(bundled):
    levelled = kvfold.compress(*bundled, text_of(BELL), "kvzip", 0.3).levelled()
    whole = kvfold.join([levelled, kvfold.compress(*bundled, text_of(RIVER), "kvzip", 0.3)])
    assert levelled.level is not None and whole.level is None


def test_a_context_that_has_read_on_says_so_after_it_was_saved(bundled, tmp_path):
    made = kvfold.compress(*bundled, text_of(BELL), "kvzip", 0.5, keep_scores=True)
    longer = made.append(text_of(RIVER))
    longer.save(tmp_path / "longer.kvfold")
    loaded = kvfold.load(tmp_path / "longer.kvfold", *bundled)
    assert loaded.stats().later == longer.stats().later > 0
    for each in (longer, loaded):
        with pytest.raises(KvfoldError, match="read on"):
            each.shrink(0.2)


def test_a_joined_context_is_saved_and_goes_on(bundled, tmp_path):
    parts = [kvfold.compress(*bundled, text_of(key), "kvzip", 0.3) for key in (BELL, RIVER)]
    whole = kvfold.join(parts)
    whole.save(tmp_path / "joined.kvfold")
    loaded = kvfold.load(tmp_path / "joined.kvfold", *bundled)
    assert [answer(loaded, key) for key in (BELL, RIVER)] == [
        answer(whole, key) for key in (BELL, RIVER)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "snapkv", "adakv"])
def test_a_joined_cache_is_cropped_by_what_it_read_since(spec):
    model, tokenizer = new_model(), word_tokenizer()
    whole = kvfold.join([compressed(model, tokenizer, spec) for _ in range(2)])
    assert whole.stats().later == 0
    with pytest.raises(KvfoldError, match="cannot take back"):
        whole.cache.crop(-60)


def test_protected_texts_are_those_of_the_document(bundled):
    model, tokenizer = bundled
    context = kvfold.compress(model, tokenizer, text_of(BELL), "knorm", 0.2, protect=[BELL])
    (span,) = context.cache.protect
    assert span == context.span(BELL)
    assert BELL in tokenizer.decode(context.ids[0, slice(*span)])
    for heads in context.cache.positions(0)[0]:
        assert {*range(*span)} <= set(heads.tolist())
    for wrong, why in (
        (["lighthouse"], "is not in the text"),
        (BELL, "a list of spans"),
        (5, "a list"),
    ):
        with pytest.raises(KvfoldError, match=why):
            kvfold.compress(model, tokenizer, text_of(BELL), "knorm", 0.2, protect=wrong)


def test_joined_documents_keep_what_each_protects(bundled):
    model, tokenizer = bundled
    parts = [
        kvfold.compress(model, tokenizer, text_of(key), "knorm", 0.5, protect=[(20, 25)])
        for key in (BELL, RIVER)
    ]
    whole = kvfold.join(parts)
    length, opening = parts[0].ids.shape[1], opening_of(whole)
    moved = 20 - opening + length
    assert whole.cache.protect == ((20, 25), (moved, moved + 5))
    longer = whole.append("A word more.")
    for heads in longer.cache.positions(0)[0]:
        assert {*range(20, 25), *range(moved, moved + 5)} <= set(heads.tolist())


def test_what_is_appended_is_kept_whole_by_kvzip_and_compressed_by_others(bundled):
    new = text_of(RIVER)
    for method in ("kvzip", "knorm"):
        context = kvfold.compress(*bundled, text_of(BELL), method, 0.3)
        longer = context.append(new)
        added = longer.ids.shape[1] - context.ids.shape[1]
        kept = longer.cache.positions(0)[0][0] >= context.ids.shape[1]
        assert int(kept.sum()) == added if method == "kvzip" else int(kept.sum()) < added


def test_an_edited_document_does_not_shrink_and_says_so(bundled):
    context = kvfold.compress(*bundled, text_of(BELL), "knorm", 0.5, keep_scores=True)
    context.shrink(0.3)
    for edited in (context.drop((40, 50)), context.replace((40, 50), "The sun is yellow.")):
        with pytest.raises(KvfoldError, match="compress the text again"):
            edited.shrink(0.3)


def test_a_document_grows_no_longer_than_its_model(bundled):
    model, tokenizer = bundled
    context = kvfold.compress(model, tokenizer, text_of(BELL), "full")
    longer = NOISE * 400
    with pytest.raises(KvfoldError, match="reads at most"):
        context.append(longer)
    with pytest.raises(KvfoldError, match="reads at most"):
        context.replace((40, 50), longer)
    with pytest.raises(KvfoldError, match="reads at most"):
        kvfold.join([context] * 20)


def test_edits_that_cannot_be_are_refused(bundled):
    tiny, tokenizer = new_model(), word_tokenizer()
    context = kvfold.compress(*bundled, text_of(BELL), "kvzip", 0.3)
    length = context.ids.shape[1]
    for mode in ("splice", "reread"):
        with pytest.raises(KvfoldError, match="chat template's"):
            context.drop((0, 3), mode=mode)
        with pytest.raises(KvfoldError, match="cannot be edited"):
            context.drop((40, length + 1), mode=mode)
        for span in ((50, 40), (40, 40), (40.0, 50.0), "the sky", None):
            with pytest.raises(KvfoldError, match="a span is a pair"):
                context.drop(span, mode=mode)
    for text in ("", None):
        with pytest.raises(KvfoldError, match="takes a text"):
            context.replace((40, 50), text)
    with pytest.raises(KvfoldError, match="is not in the text"):
        context.span("a sentence of another document")
    with pytest.raises(KvfoldError, match="occurs 10 times"):
        context.span("The sun is yellow.")
    with pytest.raises(KvfoldError, match='"splice" or "reread"'):
        context.drop((40, 50), mode="forget")
    with pytest.raises(KvfoldError, match="nothing to append"):
        context.append("")
    with pytest.raises(KvfoldError, match="two contexts"):
        kvfold.join([context])
    with pytest.raises(KvfoldError, match="one model"):
        kvfold.join([context, compressed(tiny, tokenizer, "full")])
    moved = compressed(tiny, tokenizer, "streaming_llm")
    with pytest.raises(KvfoldError, match="other positions"):
        kvfold.join([moved, moved])
    summing = compressed(tiny, tokenizer, "h2o")
    with pytest.raises(KvfoldError, match="sums the attention"):
        kvfold.join([summing, summing])
    handled = compressed(tiny, tokenizer, "full")
    handled.cache.move((40, 50), 20)
    with pytest.raises(KvfoldError, match="edit the context only"):
        handled.drop((40, 50))
    encoded = compressed(tiny, tokenizer, KIVI)
    with pytest.raises(KvfoldError, match="encodes keys"):
        encoded.drop((20, 30))
    sliding = compressed(new_model("gemma3"), tokenizer, "full")
    with pytest.raises(KvfoldError, match="sliding windows"):
        sliding.drop((20, 30))
    assert sliding.drop((20, 30), mode="reread").ids.shape[1] == sliding.ids.shape[1] - 10


MERGING = "{% for m in messages %}<|user|>\n[INST] {{ m['content'] }} [/INST]{% endfor %}"


def test_a_document_begins_in_the_token_that_merged_with_the_template(bundled):
    """Templates end in a space, which most tokenizers put before a word."""
    model, tokenizer = bundled[0], copy.deepcopy(bundled[1])
    tokenizer.chat_template = MERGING
    text = "the garden of the old house was quiet and nobody came home"
    first, second = (
        kvfold.compress(model, tokenizer, each, "knorm", 0.9, protect=[part])
        for each, part in ((text, "the garden"), (f"{text} again", "home again"))
    )
    opening, length = opening_of(first), first.ids.shape[1]
    assert tokenizer.decode(first.ids[0, opening:]).strip() == text
    assert first.cache.protect == ((opening, first.span("the garden")[1]),)
    assert first.span(text) == (opening, length)
    with pytest.raises(KvfoldError, match=r"'the' occurs 2 times.*Context\.span"):
        kvfold.compress(model, tokenizer, text, "knorm", 0.9, protect=["the"])
    assert first.span("the", occurrence=0)[0] == opening
    without = first.drop((opening, opening + 2))
    assert without.ids.tolist()[0][:opening] == first.ids.tolist()[0][:opening]
    assert tokenizer.decode(without.ids[0, opening:]).strip() == text.removeprefix("the garden ")
    whole = kvfold.join([first, second])
    assert whole.ids.shape[1] == length + second.ids.shape[1] - opening
    assert tokenizer.decode(whole.ids[0, length:]).strip() == f"{text} again"


def test_a_template_that_merged_with_one_document_only_is_joined_without_its_rest(bundled):
    model, tokenizer = bundled[0], copy.deepcopy(bundled[1])
    tokenizer.chat_template = MERGING
    merged, other = (
        kvfold.compress(model, tokenizer, text, "full")
        for text in ("the garden was quiet", "\nnobody came home")
    )
    assert opening_of(other) == opening_of(merged) + 1
    for first, second in ((merged, other), (other, merged)):
        whole = kvfold.join([first, second])
        added = whole.ids[0, first.ids.shape[1] :]
        assert added.tolist() == second.ids[0, opening_of(second) :].tolist()
