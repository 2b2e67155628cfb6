# SPDX-License-Identifier: Apache-2.0
"""Levelled contexts, their distance to the heads' own sets, and contexts in whole pages."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold import IllegalComposition, KvfoldError
from kvfold.cache.fork import fork
from kvfold.contexts.files.format import read_header
from kvfold.contexts.levelled import QUESTION, TOKENS
from tests.helpers.caches import positions
from tests.helpers.contexts import DOCUMENT, assert_same, new_model
from tests.helpers.tokenizers import word_tokenizer

UNEVEN = ["kvzip", "adakv", "pyramidkv", "kvzip:floor=0.25"]


@pytest.fixture(scope="module")
def model():
    return new_model()


def of(model, spec: str = "adakv", budget=40, **options) -> kvfold.Context:
    return kvfold.compress(model, word_tokenizer(), DOCUMENT, spec, budget, **options)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("spec", UNEVEN)
def test_a_levelled_context_is_one_compressed_with_level(model, spec) -> None:
    uneven = of(model, spec)
    for rule in ("mass", "votes", "union"):
        levelled = uneven.levelled(rule)
        assert positions(levelled.cache) == positions(
            of(model, f"{spec} + level:rule={rule}").cache
        )
        assert levelled.level.rule == rule
        in_pieces = uneven.levelled(rule, prefill_chunk=40)
        assert positions(in_pieces.cache) == positions(levelled.cache)
        heads = [head for layer in positions(levelled.cache) for head in layer[0]]
        assert {len(head) for head in heads} == {levelled.level.tokens}
        own = [len(head) for layer in positions(uneven.cache) for head in layer[0]]
        assert levelled.level.own == pytest.approx(sum(own) / len(own))
        assert set(heads[0]) == set().union(*map(set, heads))


@pytest.mark.slow
def test_the_distance_is_the_kl_along_the_uneven_answer(model) -> None:
    uneven = of(model, budget=36)
    levelled = uneven.levelled("votes")
    asked = uneven.chat().question_ids(QUESTION, "", special_tokens=False)
    whole, logits = torch.cat([uneven.ids, asked], 1), []
    whole = model.generate(
        whole, past_key_values=fork(uneven.cache), max_new_tokens=TOKENS, do_sample=False,
        suppress_tokens=None,
    )[:, uneven.ids.shape[1] : -1]  # fmt: skip
    assert whole.shape[1] == asked.shape[1] + levelled.level.measured - 1
    for context in (uneven, levelled):
        with torch.no_grad():
            read = model(whole, past_key_values=fork(context.cache)).logits[0]
        logits.append(read[asked.shape[1] - 1 :].double().log_softmax(-1))
    ours, theirs = logits
    expected = float((ours.exp() * (ours - theirs)).sum(-1).mean())
    assert expected > 1e-4 and levelled.level.kl == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_the_union_of_what_agrees_is_no_distance(model) -> None:
    assert of(model, "streaming_llm_original:decode=append").levelled("union").level.kl < 1e-6


@pytest.mark.slow
def test_files_hold_the_record(model, tmp_path) -> None:
    levelled = of(model).levelled()
    levelled.save(tmp_path / "a.kvfold")
    assert read_header(tmp_path / "a.kvfold").level == levelled.level
    loaded = kvfold.load(tmp_path / "a.kvfold", model, word_tokenizer())
    assert loaded.level == levelled.level
    assert loaded.append(" the sky").level is None
    of(model).save(tmp_path / "b.kvfold")
    assert read_header(tmp_path / "b.kvfold").level is None


@pytest.mark.slow
def test_what_cannot_be_levelled_says_why(model) -> None:
    with pytest.raises(KvfoldError, match="to one set of tokens already"):
        of(model).levelled().levelled()
    with pytest.raises(KvfoldError, match="per chunk already"):
        of(model, "snapkv", compress="per_chunk", prefill_chunk=50).levelled()
    with pytest.raises(IllegalComposition, match="heads that evict while decoding"):
        of(model, "h2o").levelled()
    with pytest.raises(KvfoldError, match="not 'loudest'"):
        of(model).levelled("loudest")


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["kvzip", "pyramidkv", "snapkv", "kvzip + pages:size=8"])
def test_a_paged_context_is_one_compressed_with_pages(model, spec) -> None:
    uneven = of(model, spec, 60)
    paged = uneven.paged(10)
    expected = of(model, f"{spec.partition(' ')[0]} + pages:size=10", 60)
    assert_same(paged.cache, expected.cache)
    in_pieces = uneven.paged(10, prefill_chunk=40)
    assert positions(in_pieces.cache) == positions(paged.cache)
    rest = uneven.ids.shape[1] % 10
    heads = [head for layer in positions(paged.cache) for head in layer[0]]
    assert all(len(head) % 10 == rest for head in heads)
    assert paged.level is None and paged.frame == uneven.frame


@pytest.mark.slow
def test_what_takes_no_pages_says_why(model) -> None:
    with pytest.raises(KvfoldError, match="to one set of tokens already"):
        of(model).levelled().paged(10)
    with pytest.raises(KvfoldError, match="per chunk already"):
        of(model, "snapkv", compress="per_chunk", prefill_chunk=50).paged(10)
    with pytest.raises(IllegalComposition, match="evicts one for each generated token"):
        of(model, "h2o").paged(10)
    with pytest.raises(KvfoldError, match="pages:size is at least 1"):
        of(model).paged(0)


@pytest.mark.slow
def test_a_context_with_pages_can_be_levelled(model) -> None:
    paged = of(model, "kvzip + pages:size=10", 60).levelled("votes")
    assert positions(paged.cache) == positions(of(model, "kvzip", 60).levelled("votes").cache)
