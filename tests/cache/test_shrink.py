# SPDX-License-Identifier: Apache-2.0
"""A cache shrunk to a budget is, entry by entry, one that was compressed to it at once."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import kvfold
from kvfold.cache.fork import fork
from kvfold.cache.shrink import check_nested, shrink, shrunk
from kvfold.errors import BudgetError, KvfoldError
from tests.helpers.budgets import METHODS, NAMED
from tests.helpers.caches import ALONE, PADDED, decode
from tests.helpers.chats import storages
from tests.helpers.contexts import DOCUMENT, assert_same, new_model
from tests.helpers.models import build, prompts
from tests.helpers.scorers import zap_of
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader

NESTED = [spec for spec in METHODS if kvfold.parse(spec).nested]
LEVELS = ["kvzip", "kvzip:level=uniform", "kvzip:level=head", "kvzip_plus", "kvzip:demote=0.3"]
BUDGETS = (1.0, 0.6, 0.4)  # the shortest row chooses one entry beside a window of 8


@pytest.fixture(scope="module")
def models() -> dict[int, Any]:
    """Models of 1, 3 and 8 query heads for each KV head."""
    shapes = {1: (8, 8), 3: (6, 2), 8: (8, 1)}
    return {
        groups: build(
            "llama", hidden_size=48, num_attention_heads=heads, num_key_value_heads=kv, head_dim=8
        )
        for groups, (heads, kv) in shapes.items()
    }


def reader_of(
    model: Any, spec: str, budget: float | str, lengths: tuple[int, ...], piece: int = 64
):
    """A reader of a prompt, in pieces."""
    ids, mask = prompts(lengths)
    cache = kvfold.CompressedCache(model, spec, budget, keep_scores=True)
    reader = Reader(model, cache, None)
    with cache.reading():
        for start in range(0, ids.shape[1], piece):
            if len(lengths) > 1:
                reader.started, reader.mask = False, mask[:, : start + piece]
            reader(ids[:, start : start + piece])
    return reader


def test_the_methods_that_the_page_names_are_nested():
    named = {"snapkv", "pyramidkv", "knorm", "keydiff", "streaming_llm", "local_window", "random"}
    assert named <= {spec.split(":")[0] for spec in NESTED}
    for spec in LEVELS:
        check_nested(kvfold.parse(spec))


def check_shrunk(model: Any, spec: str, lengths: tuple[int, ...]) -> None:
    readers = {b: reader_of(model, spec, b, lengths, piece=23) for b in BUDGETS}
    for large, small in itertools.pairwise(BUDGETS):
        before = str(readers[large].cache.stats())
        smaller = shrunk(readers[large].cache, small)
        assert_same(smaller, readers[small].cache)
        assert str(smaller.stats()) == str(readers[small].cache.stats())
        assert str(readers[large].cache.stats()) == before
    twice = shrunk(shrunk(readers[1.0].cache, 0.6), 0.4)
    assert_same(twice, readers[0.4].cache)
    other = Reader(model, twice, readers[0.4].mask)
    other.started = readers[0.4].started = True
    for one, two in zip(decode(readers[0.4], 2), decode(other, 2), strict=True):
        assert torch.equal(one, two)


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("spec", NESTED)
def test_shrunk_is_compressed_at_once(models, spec):
    check_shrunk(models[3], spec, PADDED)


ENTRIES = ["knorm", "streaming_llm:positions=reindex,sinks=2", "snapkv:window=8", "zap"]


@pytest.mark.parametrize("spec", ENTRIES)
@pytest.mark.parametrize("small", [0.4, 0.6])
def test_the_two_share_no_entries(models, spec, small, tmp_path):
    """The larger cache stays bit for bit, also where a layer keeps everything."""
    spec = zap_of(models[3], tmp_path) if spec == "zap" else spec
    large = reader_of(models[3], spec, 0.6, ALONE).cache
    before = copy.deepcopy(large)
    smaller = shrunk(large, small)

    assert_same(large, before)
    mine, theirs = (
        storages([vars(layer.state.stored()) for layer in cache.layers], {}, set())
        for cache in (smaller, large)
    )
    everything = small == 0.6 and spec.startswith("zap")  # packed entries, which never change
    assert bool(mine.keys() & theirs.keys()) == everything


@pytest.mark.slow
@pytest.mark.parametrize("spec", ENTRIES)
def test_in_place_forks_keep_what_they_share(models, spec, tmp_path):
    spec = zap_of(models[3], tmp_path) if spec == "zap" else spec
    large, small = (reader_of(models[3], spec, budget, ALONE).cache for budget in (0.6, 0.4))
    readers = [Reader(models[3], fork(large)), Reader(models[3], fork(copy.deepcopy(large)))]
    for reader in readers:
        reader.started = True
    with pytest.raises(BudgetError):
        shrink(large, 0.7)
    shrink(large, 0.4)

    for mine, theirs in zip(large.states, small.states, strict=True):
        one, two = mine.stored().named(), theirs.stored().named()
        assert one.keys() == two.keys()
        assert all(all(map(torch.equal, parts, two[name])) for name, parts in one.items())
    for one, two in zip(*(decode(reader, 2) for reader in readers), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("groups", [1, 8])
def test_shrunk_is_compressed_at_once_for_every_group(models, groups):
    check_shrunk(models[groups], "snapkv:window=8", ALONE)


@pytest.mark.parametrize("spec", LEVELS)
def test_kvzip_shrunk_is_kvzip_at_once(spec):
    model, tokenizer = new_model(), word_tokenizer()
    contexts = {
        budget: kvfold.compress(model, tokenizer, DOCUMENT, spec, budget, keep_scores=True)
        for budget in BUDGETS
    }
    for large, small in itertools.pairwise(BUDGETS):
        smaller = contexts[large].shrink(small)
        assert_same(smaller.cache, contexts[small].cache)
        assert smaller.stats().kept == contexts[small].stats().kept
    question = {"max_new_tokens": 8}
    assert contexts[1.0].shrink(0.4).ask("the sky", **question) == contexts[0.4].ask(
        "the sky", **question
    )


def test_padded_rows_of_one_pool_shrink_alone():
    model, tokenizer = new_model(), word_tokenizer()
    ids = torch.arange(60).remainder(9)[None].repeat(2, 1) + 3
    mask = torch.ones_like(ids)
    mask[1, :17] = 0
    caches = []
    for budget in (0.7, 0.3):
        cache = kvfold.CompressedCache(
            model, "kvzip", budget, tokenizer=tokenizer, keep_scores=True
        )
        kvfold.generate(
            model, ids * mask, cache=cache, attention_mask=mask, max_new_tokens=1, do_sample=False
        )
        caches.append(cache)
    large, small = caches
    for cache in caches:
        cache.crop(59 - cache.get_seq_length())
    assert_same(shrunk(large, 0.3), small)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["kvzip", "pyramidkv:window=8"])
def test_a_loaded_context_shrinks_and_is_saved_again(spec, tmp_path):
    model, tokenizer = new_model(), word_tokenizer()
    large, small = (
        kvfold.compress(model, tokenizer, DOCUMENT, spec, budget, keep_scores=True)
        for budget in (0.6, 0.25)
    )
    large.save(tmp_path / "large.kvfold")
    smaller = kvfold.load(tmp_path / "large.kvfold", model, tokenizer).shrink(0.25)
    assert_same(smaller.cache, small.cache)
    smaller.save(tmp_path / "small.kvfold")
    again = kvfold.load(tmp_path / "small.kvfold", model, tokenizer)
    assert_same(again.cache, small.cache)
    assert_same(again.shrink(0.25).cache, small.cache)


def test_bytes_and_tokens_are_budgets_too(models):
    large, small = (reader_of(models[1], "knorm", budget, ALONE).cache for budget in (60, 20))
    assert_same(shrunk(large, 20), small)
    in_bytes = reader_of(models[1], "knorm", "40000B", ALONE).cache
    assert_same(shrunk(large, "40000B"), in_bytes)


def test_the_scores_are_counted_in_bytes(models):
    with_scores = reader_of(models[1], "knorm", 0.5, ALONE).cache.stats()
    cache = kvfold.CompressedCache(models[1], "knorm", 0.5)
    Reader(models[1], cache)(prompts(ALONE)[0])
    entries = sum(n for layer in cache.stats().kept for row in layer for n in row)
    assert with_scores.state_bytes - cache.stats().state_bytes == 4 * entries


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    ["adakv", "pyramidkv_official", "d2o", "cam", "h2o", "roco", "chunkkv", "kvzip:strict=true",
     "snapkv + kivi:bits=4", "snapkv + every:interval=8", "snapkv + merge:rule=d2o", "simlayerkv",
     "full"],
)  # fmt: skip
def test_methods_that_are_not_nested_keep_no_scores(models, spec):
    method = kvfold.parse(spec)
    given = 0.5 if method.takes_budget else None
    with pytest.raises(KvfoldError, match="does not keep a part of its entries"):
        kvfold.CompressedCache(models[1], spec, given, tokenizer=word_tokenizer(), keep_scores=True)


def test_no_registered_method_is_nested_by_accident():
    """Share-sized windows, selections, head budgets, merging and encoding are not nested."""
    for spec in NAMED:
        method = kvfold.parse(spec)
        if method.nested:
            stages = method.stages()
            assert isinstance(stages.forced.recent, int), spec
            extra = (stages.select, stages.heads, stages.merge, stages.encode)
            assert extra == (None,) * 4 and stages.token_pruning is None, spec


def test_a_cache_does_not_grow(models):
    cache = reader_of(models[1], "knorm", 0.4, ALONE).cache
    for budget in (0.5, 40, "1MiB"):
        with pytest.raises(BudgetError, match="cannot grow"):
            shrunk(cache, budget)


def test_a_ratio_without_room_is_no_smaller_budget(models):
    """Compressed to it at once, the text stays whole; from that it shrinks like any other."""
    whole, half = (reader_of(models[1], "snapkv:window=8", b, ALONE).cache for b in (0.1, 0.5))
    with pytest.raises(BudgetError, match="no room beside the entries that always stay"):
        shrunk(half, 0.1)
    assert shrunk(whole, 0.05).stats().kept_fraction == 1
    assert_same(shrunk(whole, 20), reader_of(models[1], "snapkv:window=8", 20, ALONE).cache)


def test_a_cache_without_scores_does_not_shrink(models):
    cache = kvfold.CompressedCache(models[1], "knorm", 0.5)
    with pytest.raises(KvfoldError, match=r"keeps no scores.*keep_scores=True"):
        shrunk(cache, 0.2)
    Reader(models[1], cache)(prompts(ALONE)[0])
    with pytest.raises(KvfoldError, match=r"keeps no scores.*keep_scores=True"):
        shrunk(cache, 0.2)


def test_a_cache_that_has_read_on_does_not_shrink(models):
    reader = reader_of(models[1], "knorm", 0.5, ALONE)
    reader(prompts(ALONE)[0][:, :1])
    with pytest.raises(KvfoldError, match="has read on"):
        shrunk(reader.cache, 0.2)
    reader(prompts(ALONE)[0][:, :5])
    with pytest.raises(KvfoldError, match="more than once"):
        shrunk(reader.cache, 0.2)


def test_a_document_compressed_per_chunk_keeps_no_scores(models):
    with pytest.raises(KvfoldError, match="per chunk"):
        kvfold.compress(
            new_model(), word_tokenizer(), DOCUMENT, "knorm", 0.5, prefill_chunk=40,
            compress="per_chunk", keep_scores=True,
        )  # fmt: skip
