# SPDX-License-Identifier: Apache-2.0
"""Policies keep what `CompressedCache` keeps, of tensors alone, and refuse what they cannot."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvfold
from kvfold import BudgetError, CompressedCache, KvfoldError
from kvfold.bundled import FOLDER
from kvfold.methods.base import Method, Stages
from kvfold.methods.observation import Observation
from kvfold.methods.stages.when import Once
from kvfold.observers.base import Needs
from kvfold.observers.stored import TokenIds
from kvfold.policies import Kept, Policy, Prefill, Rope, policy
from tests.helpers.budgets import METHODS, SMALL, encodes, merges, reads_logits
from tests.helpers.engine import least, recorded
from tests.helpers.models import build, prompts
from tests.helpers.scorers import zap_of
from tests.test_imports import modules_after

QUERY_HEADS = 8
REFUSED = [
    spec
    for spec in METHODS
    if encodes(spec) or merges(spec) or reads_logits(spec) or spec == "full"
]
SPECS = [spec for spec in METHODS if spec not in REFUSED]
COMPOSED = ["snapkv:window=8 + adakv", "keydiff + adakv", "chunkkv:window=8 + adakv"]
FITTED = [
    f"zap:file={FOLDER}/scorer.safetensors",
    f"zap:level=uniform,file={FOLDER}/scorer.safetensors + adakv",
    f"zap_threshold:file={FOLDER}/scorer.safetensors",
    f"qfilter:file={FOLDER}/filters.safetensors",
    f"duo:sinks=2,recent=8,file={FOLDER}/heads.safetensors",
    f"snapkv:window=8 + curve:file={FOLDER}/curve.safetensors",
]
GROUPS = pytest.mark.parametrize("groups", [1, 2, 4])
LENGTHS = pytest.mark.parametrize("length", [64, 150])
# Families whose layers differ in their RoPE, or lack it; such wide windows never slide.
MIXED = {"smollm3": {}, "gemma3": {"sliding_window": 8192}}
OF_MIXED = pytest.mark.parametrize("family", MIXED)


@cache
def llama(groups: int):
    return build("llama", num_key_value_heads=QUERY_HEADS // groups)


@cache
def tensors(groups: int, length: int) -> Prefill:
    return recorded(llama(groups), prompts((length,))[0])


@cache
def mixed(family: str):
    return build(family, **MIXED[family])


def rope_by_layer(model) -> list[Rope | None]:
    """RoPE of each layer, as the model file has it."""
    turning, ropes = model.model.rotary_emb, []
    for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        by_kind = getattr(turning, f"{kind}_inv_freq", None)
        rope = Rope(turning.inv_freq if by_kind is None else by_kind)
        ropes.append(rope if getattr(layer.self_attn, "use_rope", True) else None)
    return ropes


@cache
@torch.no_grad()
def mixed_tensors(family: str, length: int) -> Prefill:
    """All that policies ask for of a model in `MIXED`, queries as its attention got them."""
    model, queries, held = mixed(family), [], DynamicCache()
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(query: Tensor, *args, **options) -> Tensor:
        queries.append(query[0])
        return attend(query, *args, **options)

    ids = prompts((length,))[0]
    with patch.object(torch.nn.functional, "scaled_dot_product_attention", noted):
        model(ids, past_key_values=held)
    return Prefill(
        [layer.keys[0] for layer in held.layers],
        [layer.values[0] for layer in held.layers],
        queries,
        rope=rope_by_layer(model),
        token_ids=ids[0],
        scale=model.model.layers[0].self_attn.scaling,
    )


def budget_of(spec: str, amount: float | str = SMALL) -> float | str | None:
    return amount if kvfold.parse(spec).takes_budget else None


@torch.no_grad()
def in_cache(model, ids: Tensor, spec: str, budget, **options) -> list[list[list[int]]]:
    """Kept positions `[L][H]` of a compressed cache that has read the prompt."""
    compressed = CompressedCache(model, spec, budget, **options)
    model(ids, past_key_values=compressed)
    layers = range(len(compressed.states))
    return [[head.tolist() for head in compressed.positions(layer)[0]] for layer in layers]


def listed(kept: Kept) -> list[list[list[int]]]:
    return [[head.tolist() for head in layer] for layer in kept.indices]


@pytest.mark.cases(16)
@LENGTHS
@GROUPS
@pytest.mark.parametrize("spec", [*SPECS, *COMPOSED])
def test_a_policy_keeps_what_the_cache_keeps(spec: str, groups: int, length: int) -> None:
    made, whole = policy(spec), tensors(groups, length)
    kept = made.keep(least(made, whole), budget_of(spec))
    ids = prompts((length,))[0]
    assert listed(kept) == in_cache(llama(groups), ids, spec, budget_of(spec))
    assert kept.counts.tolist() == [[len(head) for head in layer] for layer in listed(kept)]


@pytest.mark.parametrize("spec", ["snapkv:window=8", "keydiff", "expected_attention", "rkv", "h2o"])
def test_bfloat16_entries_are_chosen_as_in_the_cache(spec: str) -> None:
    model, ids, made = build("llama", torch.bfloat16), prompts((64,))[0], policy(spec)
    kept = made.keep(least(made, recorded(model, ids)), SMALL)
    assert listed(kept) == in_cache(model, ids, spec, SMALL)


def test_at_least_fifteen_methods_are_compared() -> None:
    assert len({kvfold.parse(spec).name for spec in SPECS}) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("spec", FITTED, ids=lambda spec: spec.split(":")[0])
def test_a_fitted_policy_keeps_what_the_cache_keeps(spec: str) -> None:
    model, _ = kvfold.bundled_model()
    ids = torch.randint(3, 300, (1, 90), generator=torch.Generator().manual_seed(0))
    made, whole = policy(spec), recorded(model, ids)
    kept = made.keep(least(made, whole), budget_of(spec))
    assert listed(kept) == in_cache(model, ids, spec, budget_of(spec))


@pytest.mark.slow
@OF_MIXED
@pytest.mark.parametrize("spec", [spec for spec in SPECS if policy(spec).needs.rope])
def test_layers_have_a_rope_of_their_own_or_none(spec: str, family: str) -> None:
    made, whole, model = policy(spec), mixed_tensors(family, 64), mixed(family)
    there = in_cache(model, prompts((64,))[0], spec, budget_of(spec))
    assert listed(made.keep(least(made, whole), budget_of(spec))) == there
    # The comparison would fail with one RoPE for all layers.
    alike = replace(least(made, whole), rope=whole.rope[0])
    assert listed(made.keep(alike, budget_of(spec))) != there


@pytest.mark.slow
@OF_MIXED
def test_a_scorers_file_is_compared_with_the_rope_of_each_layer(
    family: str, tmp_path: Path
) -> None:
    model, whole = mixed(family), mixed_tensors(family, 64)
    spec = zap_of(model, tmp_path, ",window=4")
    there = in_cache(model, prompts((64,))[0], spec, SMALL)
    assert listed(policy(spec).keep(whole, SMALL)) == there
    other = replace(whole, rope=[*whole.rope[:1], Rope.plain(8, theta=7.0), *whole.rope[2:]])
    with pytest.raises(kvfold.ScorerFileError, match="other RoPE frequencies"):
        policy(spec).keep(other, SMALL)


def test_a_model_without_rope_is_told_from_a_missing_one() -> None:
    whole, made = tensors(4, 64), policy("leverage")
    still = replace(whole, rope=Rope(torch.zeros(0)))
    nothing = replace(whole, rope=[None] * whole.layers)
    assert listed(made.keep(nothing, SMALL)) == listed(made.keep(still, SMALL))
    with pytest.raises(KvfoldError, match="give rope="):
        made.keep(replace(whole, rope=None), SMALL)


@pytest.mark.parametrize("budget", [0.3, 1.0, 40, "12KiB"])
def test_a_budget_means_the_same(budget: float | str) -> None:
    ids = prompts((64,))[0]
    kept = policy("keydiff").keep(tensors(4, 64), budget)
    assert listed(kept) == in_cache(llama(4), ids, "keydiff", budget)


def test_protected_spans_stay_and_the_seed_counts() -> None:
    ids, whole = prompts((64,))[0], tensors(4, 64)
    for options in ({"protect": [(10, 14)]}, {"seed": 5}):
        kept = policy("random").keep(whole, SMALL, **options)
        assert listed(kept) == in_cache(llama(4), ids, "random", SMALL, **options)
    protected = policy("random").keep(whole, SMALL, protect=[(10, 14)])
    assert protected.mask()[..., 10:14].all() and protected.forced[10:14].all()


def test_queries_decide() -> None:
    """The comparison above would fail with other queries."""
    made, whole = policy("snapkv:window=8"), tensors(4, 64)
    others = replace(whole, queries=[queries.flip(1) for queries in whole.queries])
    assert listed(made.keep(whole, SMALL)) != listed(made.keep(others, SMALL))


def test_one_tensor_for_all_layers_is_the_same_and_stays_as_it_is() -> None:
    made, whole = policy("snapkv:window=8 + adakv"), tensors(4, 64)
    stacked = Prefill(*map(torch.stack, (whole.keys, whole.values, whole.queries)))
    before = stacked.keys.clone(), stacked.values.clone()
    assert listed(made.keep(stacked, SMALL)) == listed(made.keep(whole, SMALL))
    assert torch.equal(stacked.keys, before[0]) and torch.equal(stacked.values, before[1])


@dataclass(frozen=True)
class LateIds(Method):
    """An own method, not registered: keeps the entries of the highest token ids."""

    def stages(self) -> Stages:
        return Stages(needs=Needs(TokenIds()), score=_ids, when=Once())


def _ids(observation: Observation) -> Tensor:
    return observation[TokenIds].float()


def test_an_own_method_is_a_policy() -> None:
    made, whole = policy(LateIds()), tensors(2, 64)
    assert made.needs.token_ids and made.needs.queries == 0
    best = whole.token_ids.argsort(descending=True, stable=True)[:SMALL].sort().values.tolist()
    assert all(head == best for layer in listed(made.keep(whole, SMALL)) for head in layer)


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", REFUSED)
def test_every_other_method_is_refused(spec: str) -> None:
    with pytest.raises(KvfoldError, match="use CompressedCache"):
        policy(spec)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("kvzip", "forwards of its own"),
        ("pyramidinfer", "forwards of its own"),
        ("kivi", "otherwise than they came"),
        ("snapkv + kivi", "otherwise than they came"),
        ("d2o", "changes the entries"),
        ("snapkv + match", "changes the entries"),
        ("full", "keeps every entry"),
    ],
)
def test_what_is_no_choice_is_refused(spec: str, reason: str) -> None:
    with pytest.raises(KvfoldError, match=reason):
        policy(spec)


@pytest.mark.parametrize(
    "spec", ["triattention:prompt={}", "snapkv:window=8 + every:interval=4,prompt={}"]
)
def test_a_method_that_keeps_the_prompt_is_refused(spec: str) -> None:
    with pytest.raises(KvfoldError, match="set prompt=counted"):
        policy(spec.format("kept"))
    kept = policy(spec.format("counted")).keep(tensors(4, 64), SMALL)
    assert (kept.counts == SMALL).all()


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        ("snapkv:window=8", "queries"),
        ("h2o", "queries"),
        ("expected_attention", "rope"),
        ("leverage", "rope"),
        ("criticalkv:window=8", "output_weights"),
    ],
)
def test_a_missing_input_is_named(spec: str, missing: str) -> None:
    with pytest.raises(KvfoldError, match=f"give {missing}="):
        policy(spec).keep(replace(tensors(4, 64), **{missing: None}), SMALL)


def test_all_queries_are_not_the_last_ones() -> None:
    whole = tensors(4, 64)
    with pytest.raises(KvfoldError, match="the queries of all tokens"):
        policy("h2o").keep(replace(whole, queries=[q[:, -8:] for q in whole.queries]), SMALL)


def test_budgets_are_checked() -> None:
    whole = tensors(4, 64)
    for spec, budget in (("snapkv:window=8", None), ("snapkv:window=8", 4), ("simlayerkv", 9)):
        with pytest.raises(BudgetError):
            policy(spec).keep(whole, budget)


def test_shapes_that_do_not_fit_are_refused() -> None:
    whole = tensors(4, 64)
    wrong = [
        {"keys": []},
        {"values": whole.values[:2]},
        {"keys": [keys[:, :9] for keys in whole.keys]},
        {"keys": [keys.long() for keys in whole.keys]},
        {"values": [values[0] for values in whole.values]},
        {"queries": [queries[..., :4] for queries in whole.queries]},
        {"queries": [queries[:3] for queries in whole.queries]},
        {"token_ids": whole.token_ids[:5]},
        {"rope": [whole.rope] * (whole.layers - 1)},
        {"rope": [whole.rope.frequencies] * whole.layers},
    ]
    for change in wrong:
        with pytest.raises(KvfoldError):
            replace(whole, **change)
    with pytest.raises(KvfoldError, match="output weights"):
        thin = replace(whole, output_weights=[w[:, :8] for w in whole.output_weights])
        policy("criticalkv:window=8").keep(thin, SMALL)


def test_files_of_other_models_are_refused() -> None:
    whole = tensors(4, 64)
    for file, spec in (
        ("scorer", "zap"),
        ("filters", "qfilter"),
        ("heads", "duo:recent=8,sinks=2"),
    ):
        path = FOLDER / f"{file}.safetensors"
        named = f"{spec},file={path}" if ":" in spec else f"{spec}:file={path}"
        with pytest.raises(kvfold.ScorerFileError, match=r"layers of|RoPE"):
            policy(named).keep(whole, SMALL)
    with pytest.raises(kvfold.ScorerFileError, match="name it, zap:file=FILE"):
        policy("zap").keep(whole, SMALL)
    with pytest.raises(kvfold.ScorerFileError, match="RoPE"):
        odd = replace(whole, rope=Rope.plain(8, theta=7.0))
        policy(f"zap:file={FOLDER}/scorer.safetensors").keep(odd, SMALL)


@pytest.mark.slow
def test_policies_import_no_transformers() -> None:
    zap = f"zap:window=0,file={FOLDER}/scorer.safetensors"
    model, _ = kvfold.bundled_model()
    frequencies = model.model.rotary_emb.inv_freq.tolist()
    shape = model.config.num_hidden_layers, model.config.num_key_value_heads, 40
    run = (
        "import torch; from kvfold.policies import Prefill, Rope, policy\n"
        f"rope = Rope(torch.tensor({frequencies}))\n"
        f"keys, values = torch.randn(2, *{shape}, {2 * len(frequencies)})\n"
        "prefill = Prefill(keys, values, keys, rope)\n"
        f"for spec in ('snapkv:window=4', '{zap}'):\n"
        "    assert policy(spec).keep(prefill, 9).counts.double().mean() == 9\n"
    )
    loaded = modules_after(run)
    assert "kvfold.policies.method_policy" in loaded
    assert not {name for name in loaded if name.split(".")[0] == "transformers"}


def test_keys_that_a_method_moves_are_the_engines_to_move() -> None:
    assert policy("finch").moves_keys and not policy("snapkv").moves_keys
    assert isinstance(policy("snapkv"), Policy)
