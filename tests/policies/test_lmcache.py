# SPDX-License-Identifier: Apache-2.0
"""Edits of LMCache's tensors, on what a real attention computed; LMCache is in tests_lmcache/."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvfold
from kvfold import BudgetError, CompressedCache, KvfoldError
from kvfold.bundled import FOLDER
from kvfold.hf.rotation import Rotation
from kvfold.policies import Prefill, SharingLoss, policy
from kvfold.policies.lmcache import LMCacheEdit
from tests.helpers.engine import recorded
from tests.helpers.models import continuation, prompts
from tests.policies.test_method_policy import OF_MIXED, llama, mixed, mixed_tensors, tensors

TOKENS, CHUNK = 144, 16
IDS = prompts((TOKENS,))[0]
ZAP = f"zap:file={FOLDER}/scorer.safetensors"
METHODS = ["snapkv:window=8", "rkv", "keydiff", "expected_attention", "snapkv:window=8 + adakv"]


class Kind(Enum):
    """As `lmcache.sdk.LMCacheSDKCacheKind`."""

    KV = "kv"
    QUERY = "query"


def flat(layers: list[Tensor]) -> Tensor:
    """`[L, T, H·D]` of one `[H, T, D]` for each layer, as LMCache stores tokens."""
    return torch.stack([layer.transpose(0, 1).flatten(1) for layer in layers])


def as_lmcache(whole: Prefill) -> dict[Kind, Tensor]:
    kv = torch.stack([flat(whole.keys), flat(whole.values)])
    return {Kind.KV: kv, Kind.QUERY: flat(whole.queries)[None]}


def edit_of(method: str, whole: Prefill, budget: float = 0.5, **options) -> LMCacheEdit:
    size = whole.keys[0].shape[-1]
    return LMCacheEdit(method, budget, head_size=size, rope=whole.rope, chunk=CHUNK, **options)


def expected(model, whole: Prefill, slots: Tensor) -> Tensor:
    """Entries at `slots`, keys rotated to 0, 1, … by the model's own rotary function."""
    shift = (torch.arange(len(slots)) - slots)[None]
    keys = [
        Rotation(model, layer)(keys[None, :, slots], shift)[0]
        for layer, keys in enumerate(whole.keys)
    ]
    return torch.stack([flat(keys), flat([values[:, slots] for values in whole.values])])


@pytest.mark.parametrize("rule", ["votes", "mass"])
@pytest.mark.parametrize("method", METHODS)
def test_an_edit_keeps_the_policys_tokens_at_consecutive_positions(method: str, rule: str) -> None:
    model, whole = llama(4), tensors(4, TOKENS)
    given = as_lmcache(whole)
    before = given[Kind.KV].clone()
    kv, ids = edit_of(method, whole, rule=rule)(given, IDS[0].tolist())
    # Half of 144 tokens, in whole chunks of 16
    slots = policy(method).keep(whole, 64).shared(rule)
    assert ids == IDS[0, slots].tolist()
    torch.testing.assert_close(kv, expected(model, whole, slots), atol=1e-5, rtol=0)
    assert torch.equal(given[Kind.KV], before)


def test_zap_needs_no_queries() -> None:
    model, _ = kvfold.bundled_model()
    ids = torch.randint(3, 300, (1, 96), generator=torch.Generator().manual_seed(0))
    whole = recorded(model, ids)
    kv, left = edit_of(ZAP, whole)({Kind.KV: as_lmcache(whole)[Kind.KV]}, ids[0].tolist())
    slots = policy(ZAP).keep(replace(whole, queries=None), 48).shared()
    assert left == ids[0, slots].tolist()
    torch.testing.assert_close(kv, expected(model, whole, slots), atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_model_goes_on_as_from_a_cache_of_the_same_tokens() -> None:
    """Of a method whose heads agree, so that one set for all is no loss."""
    model, whole, question = llama(4), tensors(4, TOKENS), continuation(1, 9)
    method = "streaming_llm:decode=append,positions=original"
    kv, ids = edit_of(method, whole)(as_lmcache(whole), IDS[0].tolist())
    cache = DynamicCache(config=model.config)
    for layer, (keys, values) in enumerate(zip(*kv, strict=True)):
        split = (each.view(len(ids), -1, 8).transpose(0, 1)[None] for each in (keys, values))
        cache.update(*split, layer)
    edited = model(question, past_key_values=cache).logits
    compressed = CompressedCache(model, f"{method} + reindex", 64)
    model(IDS, past_key_values=compressed)
    there = model(question, past_key_values=compressed).logits
    torch.testing.assert_close(edited, there, atol=2e-5, rtol=0)
    whole_text = model(torch.cat([IDS, question], 1)).logits[:, -9:]
    assert (edited - whole_text).abs().amax() > 0.1


@pytest.mark.parametrize("budget", [1.0, TOKENS])
def test_a_budget_for_everything_returns_the_same_tensor(budget: float) -> None:
    whole = tensors(4, TOKENS)
    given = as_lmcache(whole)
    kv, ids = edit_of("snapkv:window=8", whole, budget)(given, IDS[0].tolist())
    assert kv is given[Kind.KV] and ids == IDS[0].tolist()


def test_the_union_is_cut_to_whole_chunks_by_votes() -> None:
    whole = tensors(4, TOKENS)
    _, ids = edit_of("keydiff", whole, 0.3, rule="union")(as_lmcache(whole), IDS[0].tolist())
    kept = policy("keydiff").keep(whole, 32)
    size = len(kept.shared("union")) // CHUNK * CHUNK
    assert size > 32 and ids == IDS[0, kept.shared("votes", size)].tolist()


def test_the_loss_is_reported() -> None:
    whole, reports = tensors(4, TOKENS), []
    edit = edit_of("snapkv:window=8", whole, on_report=reports.append)
    edit(as_lmcache(whole), IDS[0].tolist())
    assert [type(report) for report in reports] == [SharingLoss]
    assert reports[0].shared == 64 and 0 < reports[0].mass_shared < reports[0].mass_own < 1


def test_keys_stay_where_the_model_rotates_nothing() -> None:
    whole = tensors(4, TOKENS)
    edit = LMCacheEdit("keydiff", 0.5, head_size=8, rope=None, chunk=CHUNK)
    kv, _ = edit(as_lmcache(whole), IDS[0].tolist())
    slots = policy("keydiff").keep(whole, 64).shared()
    assert torch.equal(kv, as_lmcache(whole)[Kind.KV][:, :, slots])


@pytest.mark.slow
@OF_MIXED
@pytest.mark.parametrize("method", ["keydiff", "expected_attention"])
def test_keys_turn_by_the_rope_of_their_layer(method: str, family: str) -> None:
    whole = mixed_tensors(family, TOKENS)
    kv, ids = edit_of(method, whole, scale=whole.scale)(as_lmcache(whole), IDS[0].tolist())
    slots = policy(method).keep(whole, 64).shared()
    assert ids == IDS[0, slots].tolist()
    torch.testing.assert_close(kv, expected(mixed(family), whole, slots), atol=1e-5, rtol=0)


def test_a_rope_for_each_layer_is_for_all_of_them() -> None:
    whole = tensors(4, TOKENS)
    edit = LMCacheEdit("keydiff", 0.5, head_size=8, rope=[whole.rope], chunk=CHUNK)
    with pytest.raises(KvfoldError, match="rope of 1 layers, keys of 4"):
        edit(as_lmcache(whole), IDS[0].tolist())


def test_wrong_inputs_are_refused() -> None:
    whole = tensors(4, TOKENS)
    given, ids, edit = as_lmcache(whole), IDS[0].tolist(), edit_of("snapkv:window=8", whole)
    for wrong, tokens, match in [
        ({Kind.KV: given[Kind.KV]}, ids, r"lmcache\.sdk\.qcache"),
        (given | {Kind.QUERY: given[Kind.QUERY][:, :, :128]}, ids, "queries of 128 tokens"),
        (given, ids[:128], "of 128 tokens"),
        ({Kind.QUERY: given[Kind.QUERY]}, ids, "KV None"),
        ({Kind.KV: given[Kind.KV][0]}, ids, "is wanted"),
        (given | {Kind.KV: given[Kind.KV][..., :12]}, ids, "no heads of size 8"),
    ]:
        with pytest.raises(KvfoldError, match=match):
            edit(wrong, tokens)
    with pytest.raises(BudgetError, match="whole chunks of 16"):
        edit_of("snapkv:window=8", whole, 12)(given, ids)


@pytest.mark.parametrize(
    ("method", "match"),
    [
        ("criticalkv", "weights"),
        ("kvzip", "forwards of its own"),
        ("leverage", "give rope="),
        ("triattention", "set prompt=counted"),
    ],
)
def test_methods_that_need_more_are_refused_when_the_edit_is_made(method: str, match: str) -> None:
    with pytest.raises(KvfoldError, match=match):
        LMCacheEdit(method, 0.5, head_size=8, rope=None)
    with pytest.raises(KvfoldError, match="number of tokens in a chunk"):
        LMCacheEdit("keydiff", 0.5, head_size=8, rope=None, chunk=0)
