# SPDX-License-Identifier: Apache-2.0
"""What vLLM gets of a context, without vLLM: entries, placeholders, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

import kvfold
from kvfold import ContextFileError, KvfoldError, UnsupportedModel
from kvfold.cache.fork import fork
from kvfold.contexts.files.format import opened, read_header
from kvfold.serve.vllm.checkpoint import INDEX, SINGLE
from kvfold.serve.vllm.compatibility import CompatibilityCheck
from kvfold.serve.vllm.config_checks import check_engine, context_of
from kvfold.serve.vllm.equalize import EntryCounts
from kvfold.serve.vllm.export import pages
from kvfold.serve.vllm.meta_model import MetaModel
from kvfold.serve.vllm.per_layer.scheduler import CacheGroup, PartsSchedulerSide
from kvfold.serve.vllm.per_layer.sizes import Parts, skipped
from kvfold.serve.vllm.placeholders import ServedContext, ServedFolder, UnknownContext
from kvfold.serve.vllm.request import CONTEXT, ContextPrompt
from kvfold.serve.vllm.scheduler import ContextLoad, SchedulerSide
from kvfold.serve.vllm.worker import WorkerSide, share
from tests.helpers.contexts import DOCUMENT, KIVI, new_model
from tests.helpers.tokenizers import word_tokenizer

BLOCK = 16
# Heads that keep nearly equally many.
UNEVEN = ("snapkv + adakv:floor=0.8", 60)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's checkpoint."""
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def meta_model(model: Any, folder: Path) -> MetaModel:
    return MetaModel(model.config, str(folder))


@pytest.fixture(scope="module")
def served_folder(
    model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> ServedFolder:
    """Contexts `even` of 40 entries, `other` of as many, and `uneven`."""
    path = tmp_path_factory.mktemp("contexts")
    kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40).save(path / "even.kvfold")
    kvfold.compress(model, tokenizer, DOCUMENT, "h2o", 40).save(path / "other.kvfold")
    kvfold.compress(model, tokenizer, DOCUMENT, *UNEVEN).save(path / "uneven.kvfold")
    return ServedFolder(path)


@pytest.fixture(scope="module")
def compatibility(served_folder: ServedFolder, meta_model: MetaModel) -> CompatibilityCheck:
    return CompatibilityCheck(served_folder, meta_model, "float32")


def filled(path: Path, meta_model: MetaModel, heads: slice = slice(None)) -> DynamicCache:
    """transformers' own cache with what vLLM's pages would hold."""
    cache = DynamicCache()
    with opened(path) as file:
        for page in pages(file, meta_model, heads, EntryCounts.of(file.header)):
            keys, values = (rows.transpose(0, 1)[None] for rows in (page.keys, page.values))
            cache.update(keys.to(values.dtype), values, page.layer)
    return cache


def logits(model: Any, cache: Any, first: int, ids: Tensor) -> Tensor:
    """Of tokens that follow what `cache` holds, numbered from `first` on."""
    places = torch.arange(first, first + ids.shape[1])[None]
    with torch.no_grad():
        out: Tensor = model(ids, past_key_values=cache, position_ids=places, use_cache=True).logits
    return out


QUESTION_IDS = torch.tensor([[5, 3, 7, 4, 9, 6, 10, 8, 3]])


# --- entries -------------------------------------------------------------------------------------


def assert_served_alike(
    model: Any, tokenizer: Any, path: Path, method: str, budget: Any, moves: bool = True
) -> None:
    """A question numbered from M on finds what one numbered from N on finds in the context."""
    context = kvfold.compress(model, tokenizer, DOCUMENT, method, budget)
    context.save(path)
    own = logits(model, fork(context.cache), context.ids.shape[1], QUESTION_IDS)
    cache = filled(path, MetaModel(model.config, None))
    count = cache.get_seq_length()
    assert count == min(read_header(path).layers[0].kept)
    served = logits(model, cache, count, QUESTION_IDS)
    error, spread = (own - served).abs().max(), own.max() - own.min()
    assert error < 2e-4 * spread
    if moves:
        # The keys as they were made would not do.
        plain = filled(path, Unmoved(model.config, None))
        assert (logits(model, plain, count, QUESTION_IDS) - own).abs().max() > 0.02 * spread


class Unmoved(MetaModel):
    def move(self, layer: int, keys: Tensor, by: int) -> Tensor:
        return keys.float()


@pytest.mark.parametrize("rope", ROPES)
def test_moved_keys_find_what_the_context_finds(tokenizer, tmp_path, rope):
    model = new_model(rope_parameters=ROPES[rope])
    assert_served_alike(model, tokenizer, tmp_path / "a.kvfold", "snapkv", 40)


@pytest.mark.parametrize(
    "family",
    ["mistral", "qwen2", "qwen3", "phi3", "olmo2", "granite", "glm4", "gpt_neox", "smollm3"],
)
def test_models_rotate_in_their_own_way(tokenizer, tmp_path, family):
    assert_served_alike(new_model(family), tokenizer, tmp_path / "a.kvfold", "snapkv", 40)


@pytest.mark.parametrize("method", ["h2o", "streaming_llm", "kvzip:level=uniform", "tova"])
def test_methods_that_keep_equally_many(model, tokenizer, tmp_path, method):
    assert_served_alike(model, tokenizer, tmp_path / "a.kvfold", method, 40)


def test_what_was_read_after_the_compression_goes_over_too(model, tokenizer, tmp_path, meta_model):
    for spec in ("knorm", "kvzip:level=uniform"):
        context = kvfold.compress(model, tokenizer, DOCUMENT, spec, 40)
        step = torch.tensor([[7]])
        with torch.no_grad():
            for _ in range(3):
                model(step, past_key_values=context.cache, use_cache=True)
        ids = torch.cat([context.ids, step, step, step], 1)
        context = dataclasses.replace(context, ids=ids)
        path = tmp_path / "a.kvfold"
        context.save(path)
        own = logits(model, fork(context.cache), ids.shape[1], QUESTION_IDS)
        cache = filled(path, meta_model)
        count = cache.get_seq_length()
        served = logits(model, cache, count, QUESTION_IDS)
        assert (own - served).abs().max() < 2e-4 * (own.max() - own.min())
        with opened(path) as file:
            assert ServedContext.of("a", file, EntryCounts.of(file.header)).tokens[-3:] == [7, 7, 7]


def test_a_context_that_keeps_everything_is_not_moved(model, tokenizer, tmp_path):
    assert_served_alike(model, tokenizer, tmp_path / "a.kvfold", "full", None, moves=False)


def test_half_precision_keys_are_rotated_in_float32(tokenizer, tmp_path):
    model = new_model(dtype=torch.bfloat16)
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)
    context.save(tmp_path / "a.kvfold")
    meta_model = MetaModel(model.config, None)
    with opened(tmp_path / "a.kvfold") as file:
        page = next(pages(file, meta_model, slice(None), EntryCounts.of(file.header)))
    stored = context.cache.states[0].stored().keys[0].float()
    angles = (40 - context.ids.shape[1]) * 1e4 ** (-torch.arange(0, 8, 2).double() / 8)
    cos, sin = (torch.cat([f(angles)] * 2) for f in (torch.cos, torch.sin))
    first, second = stored.double().chunk(2, -1)
    exact = stored.double() * cos + torch.cat([-second, first], -1) * sin
    assert page.keys.dtype == torch.float32
    assert (page.keys.transpose(0, 1) - exact).abs().max() < 1e-5 * exact.abs().max()


def test_a_rank_reads_its_own_heads(served_folder, meta_model):
    whole = filled(served_folder.path("uneven"), meta_model)
    for head in range(2):
        part = filled(served_folder.path("uneven"), meta_model, slice(head, head + 1))
        for mine, every in zip(part.layers, whole.layers, strict=True):
            assert torch.equal(mine.keys[0, 0], every.keys[0, head])
            assert torch.equal(mine.values[0, 0], every.values[0, head])


# --- levels --------------------------------------------------------------------------------------


def test_uneven_heads_give_what_most_heads_keep(model, tokenizer, meta_model, served_folder):
    context = kvfold.load(served_folder.path("uneven"), model, tokenizer)
    kept = [[set(row.tolist()) for row in context.cache.positions(i)[0]] for i in range(4)]
    flat = [head for layer in kept for head in layer]
    count = min(map(len, flat))
    assert count < max(map(len, flat))
    served = served_folder.get("uneven")
    assert served.kept == count
    assert served.lost == pytest.approx(1 - count * len(flat) / sum(map(len, flat)))
    cache = filled(served_folder.path("uneven"), meta_model)
    full = filled_full(model, context.ids)
    for layer, heads in enumerate(kept):
        for head, own in enumerate(heads):
            popular = sorted(own, key=lambda p: (-sum(p in other for other in flat), p))
            places = torch.tensor(sorted(popular[:count]))
            expected = full.layers[layer].values[0, head, places]
            assert torch.equal(cache.layers[layer].values[0, head], expected)


def filled_full(model: Any, ids: Tensor) -> DynamicCache:
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    return cache


def test_levels_report_what_is_lost_and_refuse_too_much(served_folder):
    header = read_header(served_folder.path("even"))
    assert EntryCounts.of(header) == EntryCounts(40, 0.0, (40,) * 4)

    def keeping(*counts: int) -> Any:
        layers = [header.layers[0].model_copy(update={"kept": list(counts)})]
        return header.model_copy(update={"layers": layers})

    assert EntryCounts.of(keeping(30, 50)) == EntryCounts(30, pytest.approx(0.25), (30,))
    with pytest.raises(KvfoldError, match=r"heads keep 29 to 51 .* 28% of them would be"):
        EntryCounts.of(keeping(29, 51))
    with pytest.raises(KvfoldError, match="kvzip:level=uniform"):
        EntryCounts.of(keeping(0, 0))


def test_uneven_layers_are_refused(model, tokenizer, tmp_path):
    kvfold.compress(model, tokenizer, DOCUMENT, "pyramidkv", 40).save(tmp_path / "a.kvfold")
    with pytest.raises(KvfoldError, match="of them would be lost"):
        ServedFolder(tmp_path).get("a")


@pytest.mark.parametrize("method", [KIVI, "think", "minicache"])
def test_encoded_entries_are_refused(model, tokenizer, tmp_path, method):
    kvfold.compress(model, tokenizer, DOCUMENT, method).save(tmp_path / "a.kvfold")
    with pytest.raises(KvfoldError, match="stores entries encoded"):
        ServedFolder(tmp_path).get("a")


# --- placeholders --------------------------------------------------------------------------------


def test_placeholders_are_tokens_that_most_heads_keep(model, tokenizer, served_folder):
    context = kvfold.load(served_folder.path("even"), model, tokenizer)
    heads = [set(row.tolist()) for i in range(4) for row in context.cache.positions(i)[0]]
    votes = {p: sum(p in head for head in heads) for head in heads for p in head}
    chosen = sorted(sorted(votes, key=lambda p: (-votes[p], p))[:40])
    assert served_folder.get("even").tokens == context.ids[0, chosen].tolist()


def test_salts_tell_contexts_and_versions_apart(model, tokenizer, tmp_path):
    served_folder, path = ServedFolder(tmp_path), tmp_path / "a.kvfold"
    kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40).save(path)
    first = served_folder.get("a")
    assert served_folder.get("a") is first
    (tmp_path / "b.kvfold").write_bytes(path.read_bytes())
    assert served_folder.get("b").salt == first.salt
    kvfold.compress(model, tokenizer, DOCUMENT, "h2o", 40).save(path)
    second = served_folder.get("a")
    assert second.salt != first.salt and second.salt.startswith("kvfold:")
    assert served_folder.ids() == ["a", "b"]


@pytest.mark.parametrize("name", ["none", "../even", "even.kvfold", "", "/etc/x", None, 5, "Even"])
def test_only_ids_of_files_that_are_there_are_known(served_folder, name):
    with pytest.raises(UnknownContext):
        served_folder.get(name)


def test_a_file_that_goes_away_meanwhile_is_unknown(tmp_path, monkeypatch):
    served_folder = ServedFolder(tmp_path)
    monkeypatch.setattr(served_folder, "path", lambda name: tmp_path / "gone.kvfold")
    with pytest.raises(UnknownContext, match="any more"):
        served_folder.get("gone")


def test_a_damaged_file_is_refused(served_folder, tmp_path):
    data = bytearray(served_folder.path("even").read_bytes())
    (tmp_path / "cut.kvfold").write_bytes(data[:-9])
    with pytest.raises(ContextFileError):
        ServedFolder(tmp_path).get("cut")


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(KvfoldError, match="no folder"):
        ServedFolder(tmp_path / "none")


# --- the served model ----------------------------------------------------------------------------


def test_a_context_fits_the_model_that_made_it(compatibility, served_folder):
    for name in served_folder.ids():
        compatibility.check(served_folder.get(name))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers 3 here, 4 in the file"),
        ({"rms_norm_eps": 1e-4}, "rms_norm_eps 0.0001 here, 1e-06 in the file"),
        ({"rope_parameters": ROPES["linear"]}, "another RoPE: factor 4.0 here"),
    ],
    ids=str,
)
def test_another_model_is_refused_by_what_differs(served_folder, folder, changes, named):
    config = new_model(**changes).config
    other = CompatibilityCheck(served_folder, MetaModel(config, str(folder)), "float32")
    with pytest.raises(ContextFileError, match="was made with another") as refusal:
        other.check(served_folder.get("even"))
    assert named in str(refusal.value)


def test_another_family_is_refused(served_folder, folder):
    config = new_model("mistral").config
    with pytest.raises(ContextFileError, match="a MistralForCausalLM here, a Llama"):
        CompatibilityCheck(served_folder, MetaModel(config, str(folder)), "float32").check(
            served_folder.get("even")
        )


def test_other_weights_of_one_configuration_are_refused(model, served_folder, tmp_path):
    new_model(seed=5).save_pretrained(tmp_path)
    other = CompatibilityCheck(served_folder, MetaModel(model.config, str(tmp_path)), "float32")
    with pytest.raises(ContextFileError, match="the same configuration, but other weights"):
        other.check(served_folder.get("even"))


def test_another_dtype_is_refused(served_folder, meta_model):
    with pytest.raises(ContextFileError, match="holds float32, and vLLM computes in bfloat16"):
        CompatibilityCheck(served_folder, meta_model, "bfloat16").check(served_folder.get("even"))


def test_weights_are_found_in_several_files_and_in_another_dtype(
    model, folder, served_folder, tmp_path
):
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    parts = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, own in parts.items():
        save_file({name: tensors[name].double() for name in own}, tmp_path / file)
    places = {name: file for file, own in parts.items() for name in own}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    CompatibilityCheck(served_folder, MetaModel(model.config, str(tmp_path)), "float32").check(
        served_folder.get("even")
    )
    del places[names[0]]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UnsupportedModel, match="has no weight"):
        CompatibilityCheck(served_folder, MetaModel(model.config, str(tmp_path)), "float32").check(
            served_folder.get("even")
        )
    (tmp_path / INDEX).unlink()
    with pytest.raises(UnsupportedModel, match="cannot read the weights"):
        CompatibilityCheck(served_folder, MetaModel(model.config, str(tmp_path)), "float32").check(
            served_folder.get("even")
        )


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"rope_parameters": DYNAMIC}),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                    "short_factor": [1.0, 1.0],
                    "long_factor": [2.0, 2.0],
                    "original_max_position_embeddings": 64,
                },
                "original_max_position_embeddings": 64,
            },
        ),
        ("deepseek_v3", {}),
        ("gpt2", {}),
    ],
)
def test_keys_that_cannot_be_moved_are_refused(family, changes):
    from tests.helpers.models import config

    with pytest.raises(UnsupportedModel, match="cannot be moved by a constant angle"):
        MetaModel(config(family, **changes), None)


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "gpt_oss", "qwen3_5", "gemma3n", "llama4"])
def test_layers_of_several_kinds_are_refused(family):
    from tests.helpers.models import config

    with pytest.raises(UnsupportedModel, match="layers that hold something else"):
        MetaModel(config(family), None)


# --- requests ------------------------------------------------------------------------------------


def request_for(served: ServedContext | None, **changes: Any) -> Any:
    """What vLLM's scheduler knows of a request."""
    asked = None if served is None else ContextPrompt(served, [5, 6, 7])
    fields = {
        "request_id": "r",
        "prompt_token_ids": [5, 6, 7] if asked is None else asked.token_ids,
        "cache_salt": None if served is None else served.salt,
        "kv_transfer_params": None if served is None else {CONTEXT: served.id},
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
        "skip_reading_prefix_cache": False,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
    } | changes
    return SimpleNamespace(num_tokens=len(fields["prompt_token_ids"]), **fields)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no salt": ({"cache_salt": None}, "needs cache_salt 'kvfold:"),
    "another's salt": ({"cache_salt": "kvfold:0"}, "needs cache_salt 'kvfold:"),
    "no context": ({"kv_transfer_params": None}, "kv_transfer_params name none"),
    "unknown context": ({"kv_transfer_params": {CONTEXT: "none"}}, "there is no context 'none'"),
    "a path": ({"kv_transfer_params": {CONTEXT: "../even"}}, "there is no context '../even'"),
    "another context": ({"kv_transfer_params": {CONTEXT: "other"}}, "needs cache_salt"),
    "few placeholders": ({"prompt_token_ids": [5]}, "does not begin with the 40 placeholders"),
    "other placeholders": ({"prompt_token_ids": [4] * 50}, "does not begin with the 40"),
    "prompt_logprobs": (
        {"sampling_params": SimpleNamespace(prompt_logprobs=1)},
        "does not go with prompt_logprobs",
    ),
    "no reading": ({"skip_reading_prefix_cache": True}, "does not go with skip_reading"),
    "pooling": ({"sampling_params": None}, "does not go with pooling"),
    "an adapter": ({"lora_request": object()}, "does not go with a LoRA adapter"),
    "an image": ({"mm_features": [object()]}, "does not go with images"),
    "embeddings": ({"prompt_embeds": object()}, "does not go with prompt_embeds"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_request_that_would_be_answered_wrongly_is_refused(served_folder, compatibility, name):
    changes, reason = WRONG[name]
    served = served_folder.get("even")
    assert context_of(request_for(served), served_folder, compatibility.check) == served
    with pytest.raises(KvfoldError, match=reason):
        context_of(request_for(served, **changes), served_folder, compatibility.check)


def test_a_request_with_nothing_after_its_placeholders_is_refused(served_folder, compatibility):
    served = served_folder.get("even")
    request = request_for(served, prompt_token_ids=served.tokens)
    with pytest.raises(KvfoldError, match="nothing follows the 40 placeholders"):
        context_of(request, served_folder, compatibility.check)
    with pytest.raises(KvfoldError, match="nothing is asked"):
        ContextPrompt(served, [])


def test_an_ordinary_request_is_none_of_kvfolds_business(served_folder, compatibility):
    for changes in ({}, {"cache_salt": "mine"}, {"kv_transfer_params": {"other": 1}}):
        assert context_of(request_for(None, **changes), served_folder, compatibility.check) is None


def engine(**changes: Any) -> Any:
    """vLLM's settings."""
    fields = {
        "kv_load_failure_policy": "fail",
        "speculative_config": None,
        "quantization": None,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    } | changes
    flat = SimpleNamespace(**fields)
    parts = ("kv_transfer_config", "parallel_config", "model_config")
    return SimpleNamespace(**dict.fromkeys(parts, flat), **fields)


def test_settings_under_which_pages_would_be_wrong_are_refused():
    check_engine(engine(), 1)
    for changes in (
        {"kv_load_failure_policy": "recompute"},
        {"speculative_config": object()},
        {"quantization": "fp8"},
        {"pipeline_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
    ):
        with pytest.raises(KvfoldError, match=next(iter(changes))):
            check_engine(engine(**changes), 1)
    with pytest.raises(KvfoldError, match="several kinds"):
        check_engine(engine(), 2)


# --- the scheduler's half ------------------------------------------------------------------------


@pytest.fixture
def scheduler_side(served_folder: ServedFolder, compatibility: CompatibilityCheck) -> SchedulerSide:
    return SchedulerSide(served_folder, compatibility, BLOCK)


def test_a_request_gets_its_context_into_its_own_pages(scheduler_side, served_folder):
    served = served_folder.get("even")
    request = request_for(served)
    assert scheduler_side.matched(request, 0) == (40, False)
    scheduler_side.allocated(request, [[9, 4, 7]], 40)
    (load,) = scheduler_side.take().loads
    assert (load.context, load.salt, load.start) == ("even", served.salt, 0)
    assert load.slots == [*range(144, 160), *range(64, 80), *range(112, 120)]
    assert load.blocks == [9, 4, 7]
    assert scheduler_side.take().loads == []


def test_what_is_cached_is_not_loaded_again(scheduler_side, served_folder):
    request = request_for(served_folder.get("even"))
    assert scheduler_side.matched(request, 32) == (8, False)
    scheduler_side.allocated(request, [[9, 4, 7]], 8)
    (load,) = scheduler_side.take().loads
    assert (load.start, load.slots, load.blocks) == (32, list(range(112, 120)), [7])
    assert scheduler_side.matched(request, 48) == (0, False)
    scheduler_side.allocated(request, [[9, 4, 7]], 0)
    assert scheduler_side.take().loads == []


def test_a_preempted_request_is_loaded_again(scheduler_side, served_folder):
    request = request_for(served_folder.get("even"))
    scheduler_side.matched(request, 0)
    scheduler_side.allocated(request, [[1, 2, 3]], 40)
    scheduler_side.take()
    request.num_tokens += 5
    assert scheduler_side.matched(request, 16) == (24, False)
    scheduler_side.allocated(request, [[1, 5, 6]], 24)
    (load,) = scheduler_side.take().loads
    assert load.start == 16 and load.blocks == [5, 6]


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_request_fails_and_nothing_is_computed_for_it(
    scheduler_side, served_folder, name
):
    request = request_for(served_folder.get("even"), **WRONG[name][0])
    assert scheduler_side.matched(request, 0) == (request.num_tokens, True)
    assert request.skip_reading_prefix_cache is False
    scheduler_side.allocated(request, [[1, 2, 3]], request.num_tokens)
    step = scheduler_side.take()
    assert step.refused == {"r": [1, 2, 3]} and step.loads == []
    assert scheduler_side.take().refused == {}


def test_pages_that_a_refused_request_shares_are_not_spoilt(scheduler_side, served_folder):
    request = request_for(served_folder.get("even"), kv_transfer_params=None)
    assert scheduler_side.matched(request, 32) == (request.num_tokens - 32, True)
    scheduler_side.allocated(request, [[1, 2, 3]], request.num_tokens - 32)
    assert scheduler_side.take().refused == {"r": [3]}


def test_an_ordinary_request_is_left_alone(scheduler_side):
    request = request_for(None)
    assert scheduler_side.matched(request, 0) == (0, False)
    scheduler_side.allocated(request, [[1]], 0)
    step = scheduler_side.take()
    assert step.loads == [] and step.refused == {}


# --- parts of layers -----------------------------------------------------------------------------


def header_keeping(served_folder: ServedFolder, *counts: int) -> Any:
    header = read_header(served_folder.path("even"))
    layers = [
        part.model_copy(update={"kept": [count, count + 1]})
        for part, count in zip(header.layers, counts, strict=True)
    ]
    return header.model_copy(update={"layers": layers})


def test_layers_keep_the_most_that_whole_pages_allow(served_folder):
    header = header_keeping(served_folder, 100, 100, 70, 36)
    parts = Parts.of("1,1,0.5,0.25", BLOCK)
    level = parts.level(header)
    assert level.layers == tuple(
        level.count - skipped(level.count, part, BLOCK) for part in parts.layers
    )
    possible = [
        count
        for count in range(1, 152)
        if all(
            count - skipped(count, part, BLOCK) <= kept
            for part, kept in zip(parts.layers, (100, 100, 70, 36), strict=True)
        )
    ]
    assert level.count == max(possible) and 0 < level.lost < 0.25
    with pytest.raises(KvfoldError, match="would be lost"):
        parts.level(header_keeping(served_folder, 100, 100, 100, 10))
    with pytest.raises(KvfoldError, match="names 2 layers, and the context has 4"):
        Parts.of("1,1", BLOCK).level(header)


@pytest.mark.parametrize("text", ["", "1,", "0,1", "1.5", "one", "nan", "-0.5"])
def test_parts_are_above_0_and_up_to_1(text):
    with pytest.raises(KvfoldError, match="name the part of every layer"):
        Parts.of(text, BLOCK)


def test_layers_get_the_last_entries_into_their_own_pages(served_folder, meta_model, tmp_path):
    (tmp_path / "even.kvfold").write_bytes(served_folder.path("even").read_bytes())
    parts = Parts.of("1,1,0.6,0.6", BLOCK)
    own = ServedFolder(tmp_path, lambda header: dataclasses.replace(parts.level(header), lost=0.0))
    served = dataclasses.replace(own.get("even"))
    level = own.counts(read_header(own.path("even")))
    assert (level.count, level.layers) == (40, (40, 40, 24, 24))
    scheduler_side = PartsSchedulerSide(own, CompatibilityCheck(own, meta_model, "float32"), BLOCK)
    scheduler_side.groups = [CacheGroup([0, 1], 1.0), CacheGroup([2, 3], 0.6)]
    request = request_for(served)
    assert scheduler_side.matched(request, 0) == (40, False)
    scheduler_side.allocated(request, [[1, 2, 3], [0, 5, 4]], 40)
    (load,) = scheduler_side.take().loads
    layers = {i: Layer(2) for i in range(4)}
    worker_side_of(own, meta_model).fill(layers, load)
    for index, size in enumerate(level.layers):
        slots = load.by_layer[index]
        assert len(slots) == size and layers[index].kv_cache[0, slots].isfinite().all()
        assert layers[index].kv_cache[0, :, 0, 0].isfinite().sum() == size
    for blocks in ([[1, 2, 3], [6, 5, 4]], [[1, 2, 3], [0, 0, 4]], [[0, 2, 3], [0, 5, 4]]):
        scheduler_side.matched(request, 0)
        with pytest.raises(KvfoldError, match="left other pages"):
            scheduler_side.allocated(request, blocks, 40)


# --- a worker's half -----------------------------------------------------------------------------


class Layer:
    """An attention layer of vLLM: pages `[blocks · BLOCK, H, D]` of keys, and of values."""

    def __init__(self, heads: int, size: int = 8) -> None:
        self.impl = SimpleNamespace(
            num_kv_heads=heads, head_size=size, do_kv_cache_update=self._update
        )
        self.kv_cache = torch.full((2, 8 * BLOCK, heads, size), torch.nan)

    def _update(self, layer: Any, keys: Tensor, values: Tensor, pages: Any, slots: Any) -> None:
        assert keys.is_contiguous() and values.is_contiguous() and layer is self
        pages[0, slots], pages[1, slots] = keys, values


def load_of(served: ServedContext, blocks: list[int], start: int = 0) -> ContextLoad:
    slots = [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, served.kept)]
    return ContextLoad(served.id, served.salt, start, slots, blocks[start // BLOCK :])


def worker_side_of(
    served_folder: ServedFolder, meta_model: MetaModel, rank: int = 0, size: int = 1
) -> WorkerSide:
    return WorkerSide(served_folder, meta_model, torch.float32, BLOCK, rank, size)


def test_pages_hold_the_context_in_order(served_folder, meta_model):
    load, worker_side = (
        load_of(served_folder.get("even"), [5, 1, 3]),
        worker_side_of(served_folder, meta_model),
    )
    layers = {i: Layer(2) for i in range(4)}
    worker_side.fill(layers, load)
    expected = filled(served_folder.path("even"), meta_model)
    for index, layer in layers.items():
        rows = layer.kv_cache[:, load.slots]
        assert torch.equal(rows[0].transpose(0, 1)[None], expected.layers[index].keys)
        assert torch.equal(rows[1].transpose(0, 1)[None], expected.layers[index].values)
        untouched = torch.ones(8 * BLOCK, dtype=torch.bool)
        untouched[load.slots] = False
        assert layer.kv_cache[:, untouched].isnan().all()


def test_ranks_hold_their_own_heads(served_folder, meta_model):
    load = load_of(served_folder.get("even"), [0, 1, 2])
    expected = filled(served_folder.path("even"), meta_model)
    for rank in range(2):
        layers = {i: Layer(1) for i in range(4)}
        worker_side_of(served_folder, meta_model, rank, 2).fill(layers, load)
        for index, layer in layers.items():
            keys = layer.kv_cache[0, load.slots, 0]
            assert torch.equal(keys, expected.layers[index].keys[0, rank])


def test_heads_are_dealt_out_as_vllm_does():
    assert [share(8, rank, 4) for rank in range(4)] == [slice(i, i + 2) for i in (0, 2, 4, 6)]
    assert [share(2, rank, 4) for rank in range(4)] == [slice(i, i + 1) for i in (0, 0, 1, 1)]
    with pytest.raises(KvfoldError, match="cannot be dealt out"):
        share(6, 0, 4)


def test_a_missing_slice_of_heads_is_refused(served_folder, meta_model):
    load = load_of(served_folder.get("even"), [0, 1, 2])
    # One of two ranks, which thinks that it is alone.
    layers = {i: Layer(1) for i in range(4)}
    with pytest.raises(KvfoldError, match=r"holds 1 heads of size 8 .* gives 2"):
        worker_side_of(served_folder, meta_model).fill(layers, load)
    with pytest.raises(KvfoldError, match=r"holds 2 heads of size 16"):
        worker_side_of(served_folder, meta_model).fill({i: Layer(2, 16) for i in range(4)}, load)
    other = {i: Layer(2) for i in range(4)}
    del other[0].impl.do_kv_cache_update
    with pytest.raises(KvfoldError, match="fills its pages in the attention itself"):
        worker_side_of(served_folder, meta_model).fill(other, load)
    with pytest.raises(KvfoldError, match="no attention layer 3"):
        worker_side_of(served_folder, meta_model).fill({i: Layer(2) for i in range(3)}, load)


def test_a_broken_page_is_remembered(served_folder, meta_model, monkeypatch):
    served, worker_side = served_folder.get("even"), worker_side_of(served_folder, meta_model)
    first, again = ({i: Layer(2) for i in range(4)} for _ in range(2))
    worker_side.fill(first, load_of(served, [0, 1, 2]))
    monkeypatch.setattr(served_folder, "path", lambda name: pytest.fail("the file is read again"))
    load = load_of(served, [0, 1, 6], start=2 * BLOCK)
    worker_side.fill(again, load)
    for index, layer in again.items():
        expected = first[index].kv_cache[:, 2 * BLOCK : 40]
        assert torch.equal(layer.kv_cache[:, load.slots], expected)


def test_a_file_that_was_replaced_meanwhile_is_refused(served_folder, meta_model):
    served = dataclasses.replace(served_folder.get("even"), salt=served_folder.get("other").salt)
    with pytest.raises(ContextFileError, match="was replaced meanwhile"):
        worker_side_of(served_folder, meta_model).fill(
            {i: Layer(2) for i in range(4)}, load_of(served, [0, 1, 2])
        )
