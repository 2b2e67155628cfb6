# SPDX-License-Identifier: Apache-2.0
"""level: one set of tokens for all layers and heads, beside sets counted by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import kvfold
from kvfold import IllegalComposition, UnsupportedModel, parse
from kvfold.policies import policy
from kvfold.store.dense import DenseStore
from tests.helpers.budgets import SMALL
from tests.helpers.caches import ALONE, BATCHES, PADDED, decode, positions, same, start
from tests.helpers.contexts import DOCUMENT, new_model
from tests.helpers.engine import recorded
from tests.helpers.exactness import against_truth
from tests.helpers.models import build, prompts
from tests.helpers.tokenizers import word_tokenizer

UNEVEN = ["snapkv:window=8 + adakv", "pyramidkv:window=8", "keydiff"]
RULES = ("mass", "votes", "union")


def one_row(cache, row: int) -> list[list[int]]:
    """Positions that each layer and head of a row keeps."""
    return [layer[row][head] for layer in positions(cache) for head in range(len(layer[row]))]


@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("spec", UNEVEN)
def test_the_union_and_the_votes_are_counted(spec, lengths) -> None:
    model = build("llama")
    own, union, votes = (
        start(model, each, lengths).cache
        for each in (spec, f"{spec} + level:rule=union", f"{spec} + level:rule=votes")
    )
    for row in range(len(lengths)):
        heads = one_row(own, row)
        counts = Counter(token for head in heads for token in head)
        assert len(set(map(tuple, heads))) > 1
        assert one_row(union, row) == [sorted(counts)] * len(heads)
        (chosen,) = set(map(tuple, one_row(votes, row)))
        assert len(chosen) == sum(map(len, heads)) // len(heads)
        least = min(counts[token] for token in chosen)
        left = set(counts) - set(chosen)
        # Forced ones aside, nothing that was left out has more votes.
        assert all(counts[token] <= least for token in left) or spec == "keydiff"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spec", UNEVEN)
def test_policies_keep_the_same_set(spec, rule) -> None:
    model, ids = build("llama"), prompts(ALONE)[0]
    whole = recorded(model, ids)
    expected = policy(spec).keep(whole, SMALL).shared(rule).tolist()
    cache = start(model, f"{spec} + level:rule={rule}").cache
    heads = one_row(cache, 0)
    assert heads == [expected] * len(heads)
    own = policy(f"{spec} + level:rule={rule}").keep(whole, SMALL)
    assert [head.tolist() for layer in own.indices for head in layer] == heads


@pytest.mark.cases(3)
@pytest.mark.slow
@BATCHES
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_answers_are_those_of_the_set_alone(family, rule, lengths) -> None:
    spec = f"snapkv:window=8 + adakv + level:rule={rule}"
    off, effect, _ = against_truth(family, spec, lengths, torch.float64, every_step=False)
    assert off <= 1e-6 and (effect > 1e-3 or rule == "union")


def test_a_row_of_a_batch_keeps_what_it_keeps_alone() -> None:
    model, spec = build("llama"), "snapkv:window=8 + adakv + level"
    batch = start(model, spec, PADDED).cache
    ids, _ = prompts(PADDED)
    for row, length in enumerate(PADDED):
        alone = kvfold.CompressedCache(model, spec, SMALL)
        with torch.no_grad():
            model(ids[row : row + 1, -length:], past_key_values=alone)
        shifted = [[place - (64 - length) for place in head] for head in one_row(batch, row)]
        assert shifted == one_row(alone, 0)


def test_heads_of_any_size_become_one_rectangle() -> None:
    model, tokenizer = new_model(), word_tokenizer()
    for spec in ("kvzip", "snapkv + adakv"):
        context = kvfold.compress(model, tokenizer, DOCUMENT, f"{spec} + level", 40)
        assert all(isinstance(state.store, DenseStore) for state in context.cache.states)
        assert len(set(map(tuple, one_row(context.cache, 0)))) == 1
        assert context.ask("the sky is", max_new_tokens=4)
    opening = int(kvfold.compress(model, tokenizer, DOCUMENT, "kvzip", 40).cache.phase.prefix)
    assert one_row(context.cache, 0)[0] and opening >= 0


def test_later_turns_and_files_keep_one_set(tmp_path) -> None:
    model, tokenizer = new_model(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv + adakv + level", 40)
    context.save(tmp_path / "a.kvfold")
    loaded = kvfold.load(tmp_path / "a.kvfold", model, tokenizer)
    assert positions(loaded.cache) == positions(context.cache)
    longer = context.append(" " + DOCUMENT)
    assert len(set(map(tuple, one_row(longer.cache, 0)))) == 1
    assert longer.stats().seen > context.stats().seen


def test_a_budget_that_holds_all_evicts_nothing() -> None:
    model = build("llama")
    levelled, full = (
        start(model, f"snapkv:window=8{more}", budget=1.0) for more in (" + level", "")
    )
    assert positions(levelled.cache) == positions(full.cache)
    assert same(decode(levelled), decode(full))


def test_heads_of_latents_are_refused_as_without_it() -> None:
    for spec in ("auto:window=8", "auto:window=8 + level"):
        with pytest.raises(UnsupportedModel, match="latents, one for all heads"):
            start(build("deepseek_v3"), spec, budget=None)


def test_what_it_goes_with() -> None:
    for wrong in ("level", "kivi + level"):
        with pytest.raises(IllegalComposition, match="compose it with a method that does"):
            parse(wrong).stages()
    for wrong in ("h2o + level", "snapkv + every + level"):
        with pytest.raises(IllegalComposition, match="heads that evict while decoding"):
            parse(wrong).stages()
    assert "any head" in parse("kvzip + level:rule=union").stages().inexact
    assert not parse("kvzip + level").stages().inexact
    assert not parse("kvzip + level").by_head
    assert parse("kvzip + level").takes_budget and not parse("simlayerkv + level").takes_budget
