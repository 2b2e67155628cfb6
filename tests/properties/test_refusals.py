# SPDX-License-Identifier: Apache-2.0
"""What cannot be answered right is refused, with a reason and a way out."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import resource
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_utils import AttentionInterface

import kvfold
from kvfold import BudgetError, CompressedCache, IllegalComposition, KvfoldError, UnsupportedModel
from kvfold.cache import trial
from kvfold.cache.fork import fork
from kvfold.hf import models, versions
from kvfold.hf.attention import NAMES, attention_name, is_enabled
from tests.helpers.budgets import COMPRESSING
from tests.helpers.longrope import longrope, notices_drops
from tests.helpers.models import (
    WITHOUT_INTERFACE,
    WITHOUT_OUR_CACHE,
    build,
    config,
    continuation,
    prompts,
)
from tests.helpers.truth import Reader, stock_cache

GREEDY = {"do_sample": False, "max_new_tokens": 8}


@pytest.fixture
def model():
    return build("llama")


# --- options of methods ----------------------------------------------------------------------

NUMBERS = sorted(
    (name, option.name)
    for name, cls in kvfold.list_methods().items()
    for option in dataclasses.fields(cls)
    if type(option.default) is int and name == cls.name
)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """2 GiB more than is used."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = re.search(r"VmSize:\s*(\d+) kB", Path("/proc/self/status").read_text())
    resource.setrlimit(resource.RLIMIT_AS, (int(used[1]) * 1024 + 2**31, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_the_largest_number_of_an_option_takes_no_memory(model, little_memory, name, option):
    try:
        method = kvfold.parse(f"{name}:{option}={2**31 - 1}")
        cache = CompressedCache(model, method, 0.5 if method.takes_budget else None)
        kvfold.generate(model, prompts((60,))[0], cache=cache, max_new_tokens=1)
    except KvfoldError as refused:
        assert re.search(f"{name}|{option.rpartition('_')[2]}|budget", str(refused))


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_a_number_that_no_tensor_holds_is_refused_by_its_option(name, option):
    with pytest.raises(KvfoldError, match=f"{name}|{option.rpartition('_')[2]}"):
        kvfold.parse(f"{name}:{option}={10**20 + 1}")


# --- models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_models_that_compute_attention_themselves_are_refused(name):
    model = build(name)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match="attention itself"):
        CompressedCache(model, "snapkv", 64)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", WITHOUT_OUR_CACHE)
def test_models_that_would_be_answered_wrongly_are_refused_when_a_cache_is_made(name):
    model = build(name)
    before = model.config._attn_implementation
    for spec in ("knorm", "h2o", "knorm"):
        with pytest.raises(UnsupportedModel, match=r"cannot tell what|cannot read on"):
            CompressedCache(model, spec, 20)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("change", ["twice", "values", "keys", "mask"])
def test_attention_to_other_than_one_update_is_noticed(model, monkeypatch, change):
    """Keys and values of every update are attended to once, by a mask of all that was seen."""
    kvfold.enable(model)
    name, ours = NAMES["sdpa"], AttentionInterface._global_mapping[NAMES["sdpa"]]

    def changed(module, query, key, value, mask, **options):
        if change == "twice":
            ours(module, query, key, value, mask, **options)
        elif change == "values":
            value = value.clone()
        elif change == "keys":
            key, value = key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1)
        else:
            mask = torch.zeros(1, 1, query.shape[2], key.shape[2] + 1)
        return ours(module, query, key, value, mask, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, name, changed)
    with pytest.raises(UnsupportedModel, match="cannot tell what"):
        CompressedCache(model, "knorm", 20)
    monkeypatch.undo()
    cache = CompressedCache(model, "knorm", 20)
    monkeypatch.setitem(AttentionInterface._global_mapping, name, changed)
    with pytest.raises(UnsupportedModel, match="cannot tell what"):
        Reader(model, cache)(prompts((64,))[0])


def test_a_model_that_writes_nothing_to_its_cache_is_refused(model, monkeypatch):
    monkeypatch.setattr(trial, "read_tokens", lambda *_: None)
    with pytest.raises(UnsupportedModel, match="does not write every token"):
        CompressedCache(model, "knorm", 20)


def test_encoder_decoders_are_refused():
    config = T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, pad_token_id=0
    )
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        CompressedCache(T5ForConditionalGeneration(config), "snapkv", 64)


def test_a_model_whose_layers_all_slide_is_refused():
    with pytest.raises(UnsupportedModel, match="nothing to compress"):
        CompressedCache(build("mistral", sliding_window=16), "snapkv", 64)


@pytest.mark.parametrize(
    ("loaded", "used"),
    [("flex_attention", "sdpa"), ("flash_attention_2", "sdpa"), ("paged|eager", "eager")],
)
def test_other_attention_gives_way_with_one_warning(model, loaded, used):
    ids = prompts((64,))[0]
    model.set_attn_implementation(used)
    expected = Reader(model, stock_cache(model))(ids)
    model.config._attn_implementation = loaded
    with pytest.warns(UserWarning, match=f"loaded with .*attends with '{used}'") as noted:
        cache = CompressedCache(model, "snapkv:window=8", 1.0)
        CompressedCache(model, "knorm", 20)
    assert len(noted) == 1
    assert torch.equal(Reader(model, cache)(ids), expected)
    assert attention_name(model) == used


def test_a_disabled_model_attends_as_it_was_loaded(model):
    model.set_attn_implementation("flex_attention")
    with pytest.warns(UserWarning, match="flex_attention"):
        kvfold.enable(model)
    kvfold.disable(model)
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("loaded", [None, "flex_attention"])
def test_models_without_sdpa_work_as_transformers_loads_them(name, loaded):
    options = {} if loaded is None else {"attn_implementation": loaded}
    model = transformers.AutoModelForCausalLM.from_config(config(name), **options).eval()
    with contextlib.nullcontext() if loaded is None else pytest.warns(UserWarning, match="'eager'"):
        cache = CompressedCache(model, "snapkv:window=8", 20)
    reader = Reader(model, cache)
    reader(prompts((64,))[0])
    assert torch.isfinite(reader(continuation(1, 1))).all()
    assert attention_name(model) == "eager"


@pytest.mark.parametrize("names", [("llama", "llama"), ("llama", "gpt2")])
def test_a_cache_works_with_its_own_model_only(names):
    mine, other = (build(name, seed=i) for i, name in enumerate(names))
    kvfold.enable(other)
    cache = CompressedCache(mine, "knorm", 20)
    with pytest.raises(UnsupportedModel, match="another model"):
        Reader(other, cache)(prompts((64,))[0])


@pytest.mark.parametrize("read", [0, 64], ids=["fresh", "filled"])
def test_a_cache_with_another_model_that_was_never_enabled_is_refused(read):
    model, other = build("llama"), build("llama", seed=1)
    cache = CompressedCache(model, "knorm", 20)
    ids = prompts((65,))[0]
    if read:
        Reader(model, cache)(ids[:, :read])
    with pytest.raises(UnsupportedModel, match="kvfold's attention"):
        Reader(other, cache)(ids[:, read:])


def test_a_disabled_model_is_stock_again_and_refuses_the_cache(model):
    ids = prompts((64,))[0]
    stock = Reader(build("llama"), stock_cache(model))(ids)
    cache = CompressedCache(model, "knorm", 20)
    Reader(model, cache)(ids)
    kvfold.disable(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(Reader(model, stock_cache(model))(ids), stock)
    with pytest.raises(UnsupportedModel, match="disable"):
        Reader(model, cache)(continuation(1, 1))


def test_an_enabled_model_without_our_cache_is_stock(model):
    ids, mask = prompts()
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    kvfold.enable(model)
    assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)


def test_a_disabled_model_announces_no_padding_of_other_models(model):
    cache, other = CompressedCache(model, "knorm", 20), build("qwen2")
    kvfold.enable(other)
    kvfold.disable(model)
    with pytest.raises(UnsupportedModel, match="disable"):
        Reader(model, cache)(prompts((12,))[0])
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, -3:] = 0  # a stock cache may be padded as one likes
    ids = prompts((12, 12))[0]
    with torch.no_grad():
        assert other(ids, attention_mask=mask).logits.isfinite().all()


def test_a_first_cache_that_another_thread_tries_out_is_waited_for(model, monkeypatch):
    """Whether the model can be used is known to neither before that."""
    tried, together = [], threading.Barrier(2)

    def cannot(*_: object) -> None:
        tried.append(threading.get_ident())
        time.sleep(0.1)
        raise UnsupportedModel("this model cannot")

    def make() -> None:
        together.wait()
        with pytest.raises(UnsupportedModel, match="cannot"):
            CompressedCache(model, "knorm", 20)

    monkeypatch.setattr(trial, "_read", cannot)
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(make) for _ in range(2)]
    assert made[0].exception() is None and made[1].exception() is None
    assert len(set(tried)) == 2
    assert not is_enabled(model) and not model._forward_hooks


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_failed_forward_leaves_no_mark_on_other_caches(name):
    model = build(name)
    ids, token = prompts((20,))[0], continuation(1, 1)
    clean = Reader(model, stock_cache(model))
    expected = [clean(ids), clean(token)]
    broken = CompressedCache(model, "knorm", 20)
    Reader(model, broken)(prompts((64,))[0])
    latest = broken.layers[0].keys[:, :, -1:], broken.layers[0].values[:, :, -1:]
    broken.update(*latest, 0)  # and then something went wrong: its attention never came
    before = broken.stats()
    again = Reader(model, stock_cache(model))
    assert torch.equal(again(ids), expected[0]) and torch.equal(again(token), expected[1])
    assert broken.stats() == before
    with pytest.raises(UnsupportedModel, match="make a new cache"):
        Reader(model, broken)(token)


def test_a_cache_does_not_keep_its_model_alive():
    model = build("llama")
    cache = CompressedCache(model, "streaming_llm", 20)
    Reader(model, cache)(prompts((64,))[0])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and len(cache.positions(0)[0][0]) == 20


# --- methods ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("snapvk", "did you mean 'snapkv'"),
        ("", "empty method name"),
        ("snapkv:windows=3", "no option 'windows'"),
        ("snapkv:window", "option=value"),
        ("snapkv:window=", "option=value"),
        ("snapkv:window=many", "takes int"),
        ("snapkv:pooling=min", "max or avg"),
        ("tova:per_head=perhaps", "takes bool"),
    ],
)
def test_bad_methods_are_refused(model, spec, reason):
    with pytest.raises(KvfoldError, match=reason):
        CompressedCache(model, spec, 64)


def test_two_methods_that_both_choose_are_refused(model):
    with pytest.raises(IllegalComposition, match=r"snapkv.* and .*h2o.*both"):
        CompressedCache(model, "snapkv + h2o", 64)


# --- budgets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, -5, 0.0, -0.1, 1.5, "0", "0%", "-3", "150%", "0MiB"])
@pytest.mark.parametrize("spec", ["knorm", "snapkv"])
def test_budgets_that_cannot_be_are_refused(model, spec, budget):
    with pytest.raises(BudgetError, match=r"positive|at most 1"):
        CompressedCache(model, spec, budget)


@pytest.mark.parametrize("budget", [True, [64], "many", "3 apples", float("nan")])
def test_budgets_that_are_none_are_refused(model, budget):
    with pytest.raises(BudgetError):
        CompressedCache(model, "knorm", budget)


@pytest.mark.parametrize("spec", COMPRESSING)
def test_a_missing_budget_is_refused(model, spec):
    with pytest.raises(BudgetError, match="needs a budget"):
        CompressedCache(model, spec)


@pytest.mark.parametrize("budget", [64, 0.5, "1MiB"])
def test_a_superfluous_budget_is_refused(model, budget):
    with pytest.raises(BudgetError, match="no budget"):
        CompressedCache(model, "full", budget)


@pytest.mark.parametrize(
    ("spec", "protect", "least"),
    [
        ("snapkv", [], 32),
        ("snapkv_official", [], 64),
        ("pyramidkv", [], 8),
        ("streaming_llm", [], 4),
        ("streaming_llm:sinks=7", [], 7),
        ("knorm:protect_recent=9", [], 9),
        ("snapkv:window=8", [(0, 5), (3, 10)], 18),
        ("streaming_llm", [(2, 10)], 10),
        ("h2o", [(20, 32)], 12),
    ],
)
def test_a_budget_below_what_must_stay_is_refused_with_both_numbers(model, spec, protect, least):
    with pytest.raises(BudgetError, match=rf"\b{least}\b.*\b{least - 1}\b"):
        CompressedCache(model, spec, least - 1, protect=protect)
    cache = CompressedCache(model, spec, least, protect=protect)
    Reader(model, cache)(prompts((80,))[0])
    assert sum(len(cache.positions(layer)[0][0]) for layer in range(4)) == 4 * least


def test_a_ratio_that_comes_out_below_what_must_stay_keeps_it_and_says_so(model):
    cache = CompressedCache(model, "snapkv:window=8", 0.1)
    Reader(model, cache)(prompts((64,))[0])
    assert cache.positions(0)[0][0].tolist() == list(range(56, 64))
    assert cache.stats().forced_over_budget and "forced" in str(cache.stats())
    enough = CompressedCache(model, "snapkv:window=8", 0.2)
    Reader(model, enough)(prompts((64,))[0])
    assert not enough.stats().forced_over_budget


def test_whole_layers_that_do_not_fit_are_refused(model):
    cache = CompressedCache(model, "knorm:skip_layers=0/1", 0.2)
    with pytest.raises(BudgetError, match="skip fewer layers"):
        Reader(model, cache)(prompts((64,))[0])


# --- padding ---------------------------------------------------------------------------------


def without(columns: slice | int, length: int = 40) -> torch.Tensor:
    """A mask of two rows, in the second of which `columns` are padding."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, columns] = 0
    return mask


def contents(cache: CompressedCache) -> list[torch.Tensor]:
    """Copies of all that the layers store."""
    keyed = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [x.clone() for layer in keyed for x in (layer.keys, layer.values)]


@pytest.mark.parametrize("spec", ["snapkv:window=8", "h2o", "tova", "think:queries=8,recent=8"])
@pytest.mark.parametrize("columns", [slice(-3, None), -1, slice(5, 15)], ids=["3", "1", "hole"])
def test_padding_to_the_right_is_refused_before_anything_is_stored(model, spec, columns):
    budget = 20 if kvfold.parse(spec).takes_budget else None
    cache = CompressedCache(model, spec, budget)
    ids = prompts((40, 40))[0]
    with pytest.raises(KvfoldError, match="pad on the left"):
        Reader(model, cache, without(columns))(ids)
    with pytest.raises(KvfoldError, match="pad on the left"):
        kvfold.generate(model, ids, cache=cache, attention_mask=without(columns), **GREEDY)
    assert cache.get_seq_length() == 0
    reader = Reader(model, cache, without(slice(0, 7)))
    reader(ids)
    before = contents(cache)
    with pytest.raises(KvfoldError, match="pad on the left"):
        reader(continuation(2, 4) * torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))
    assert cache.get_seq_length() == 40
    assert all(map(torch.equal, contents(cache), before))


def test_a_prompt_whose_last_piece_is_padding_is_not_answered(model):
    ids, mask = prompts((40, 40))[0], without(slice(-8, None))
    cache = CompressedCache(model, "snapkv:window=8", 20)
    options = {"attention_mask": mask, "prefill_chunk": 8, **GREEDY}
    with pytest.raises(KvfoldError, match="pad on the left"):
        kvfold.generate(model, ids, cache=cache, **options)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "llama4", "qwen3_5"])
def test_padding_between_tokens_is_refused_where_layers_count_it(name):
    """Windows and states of transformers' own layers would not be those of the row alone."""
    model, ids = build(name), prompts((40, 40))[0]
    cache = CompressedCache(model, "snapkv:window=8", 20)
    reader = Reader(model, cache, without(slice(0, 7)))
    reader(ids)
    before = contents(cache)
    mask, later = reader.mask, continuation(2, 6)
    with pytest.raises(KvfoldError, match="each row with a cache of its own"):
        reader(later * without(slice(0, 2), 6))
    assert cache.get_seq_length() == 40
    assert all(map(torch.equal, contents(cache), before))
    reader.mask = mask
    assert torch.isfinite(reader(later)).all()


# --- rotations -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3"])
def test_sinks_do_not_move_without_rotary_keys(name):
    model = build(name)
    with pytest.raises(UnsupportedModel, match='positions="original"'):
        CompressedCache(model, "streaming_llm", 20)
    CompressedCache(model, "streaming_llm_original", 20)


def test_sinks_do_not_move_where_frequencies_change_with_the_length():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = build("llama", rope_parameters=rope)
    with pytest.raises(UnsupportedModel, match='positions="original"'):
        CompressedCache(model, "streaming_llm", 20)
    CompressedCache(model, "streaming_llm_original", 20)


def test_longrope_is_refused_where_a_dropped_cache_goes_unnoticed(monkeypatch):
    monkeypatch.setattr(models, "TELLS_CACHE_FROM", Version("99"))
    with pytest.raises(UnsupportedModel, match="transformers 99"):
        CompressedCache(longrope(), "snapkv:window=8", 20)


@notices_drops
def test_longrope_is_refused_by_generate_and_works_with_ours():
    model = longrope()
    ids = prompts((64,))[0]
    cache = CompressedCache(model, "snapkv:window=8", 20)
    with pytest.raises(UnsupportedModel, match=r"kvfold\.generate"):
        model.generate(ids, past_key_values=cache, **GREEDY)
    cache = CompressedCache(model, "snapkv:window=8", 20)
    kvfold.generate(model, ids, cache=cache, **GREEDY)
    assert cache.get_seq_length() == 64 + 7
    assert cache.stats().kept == [[[27, 27]]] * 4


@notices_drops
def test_longrope_with_budget_to_spare_is_stock():
    model = longrope()
    ids, mask = prompts((64, 53, 40))
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    for chunk in (None, 10):
        cache = CompressedCache(model, "snapkv:window=8", 1.0)
        options = {"attention_mask": mask, "prefill_chunk": chunk, **GREEDY}
        assert torch.equal(kvfold.generate(model, ids, cache=cache, **options), expected)


@notices_drops
def test_longrope_refuses_to_generate_across_its_limit():
    model = longrope()
    crossing, inside = prompts((28,))[0], prompts((20,))[0]
    cache = CompressedCache(model, "snapkv:window=8", 10)
    with pytest.raises(UnsupportedModel, match="32 tokens"):
        kvfold.generate(model, crossing, cache=cache, **GREEDY)
    assert cache.get_seq_length() == 0
    kvfold.generate(model, inside, cache=cache, **GREEDY)
    assert cache.get_seq_length() == 27 and cache.stats().kept[0][0] == [17, 17]


@notices_drops
def test_longrope_sinks_do_not_move():
    with pytest.raises(UnsupportedModel, match='positions="original"'):
        CompressedCache(longrope(), "streaming_llm", 20)


# --- generate --------------------------------------------------------------------------------


def test_a_prompt_shorter_than_what_was_seen_is_refused(model):
    cache = CompressedCache(model, "knorm", 20)
    text = kvfold.generate(model, prompts((64,))[0], cache=cache, **GREEDY)
    for length in (20, 70, 71):
        with pytest.raises(KvfoldError, match="whole"):
            kvfold.generate(model, text[:, :length], cache=cache, **GREEDY)
    kvfold.generate(model, text[:, :72], cache=cache, **GREEDY)


@pytest.mark.parametrize("chunk", [0, -4])
def test_a_chunk_of_no_tokens_is_refused(model, chunk):
    cache = CompressedCache(model, "knorm", 20)
    with pytest.raises(KvfoldError, match="prefill_chunk"):
        kvfold.generate(model, prompts((64,))[0], cache=cache, prefill_chunk=chunk, **GREEDY)


def test_assisted_decoding_outside_kvfold_generate_is_refused(model):
    cache = CompressedCache(model, "snapkv:window=8", 20)
    with pytest.raises(KvfoldError, match=r"kvfold\.generate"):
        model.generate(
            prompts((64,))[0], past_key_values=cache, prompt_lookup_num_tokens=3, **GREEDY
        )


def test_assisted_decoding_is_refused_where_transformers_answers_wrongly(model, monkeypatch):
    monkeypatch.setattr(versions, "ASSISTED_FROM", Version("99"))
    cache = CompressedCache(model, "snapkv:window=8", 20)
    with pytest.raises(KvfoldError, match="transformers 99"):
        kvfold.generate(model, prompts((64,))[0], cache=cache, prompt_lookup_num_tokens=3, **GREEDY)
    assert cache.get_seq_length() == 0


def test_evicted_tokens_are_not_taken_back(model):
    cache = CompressedCache(model, "snapkv:window=8", 20)
    Reader(model, cache)(prompts((64,))[0])
    with pytest.raises(KvfoldError, match="frozen"):
        cache.crop(-40)
    with pytest.raises(KvfoldError, match="minus"):
        cache.crop(40)


@pytest.mark.parametrize("frozen", [False, True], ids=["evicting", "frozen"])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "cohere2", "llama4", "qwen3_5"])
def test_tokens_that_other_layers_let_go_of_are_not_taken_back(name, frozen):
    model = build(name)
    readers = [Reader(model, CompressedCache(model, "snapkv:window=8", 1.0)) for _ in range(2)]
    for reader in readers:
        reader(prompts((64,))[0])
    cropped, untouched = (reader.cache for reader in readers)
    with cropped.frozen() if frozen else contextlib.nullcontext():
        for reader in readers:
            reader(continuation(1, 3))
        with pytest.raises(KvfoldError, match="let go of older tokens"):
            cropped.crop(-2)
        cropped.crop(0)
    assert cropped.stats().kept == untouched.stats().kept
    assert torch.equal(readers[0](continuation(1, 1)), readers[1](continuation(1, 1)))


def test_a_sliding_window_that_has_not_slid_is_cropped():
    model = build("gemma3")
    ids = prompts((12,))[0]
    reader, alone = (Reader(model, CompressedCache(model, "knorm", 1.0)) for _ in range(2))
    reader(ids)
    reader.cache.crop(-5)
    alone(ids[:, :-5])
    expected, got = (r(continuation(1, 1)) for r in (alone, reader))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("index", [0, 1, 3])
def test_layers_of_unequal_length_are_noticed_before_anything_is_stored(index):
    model = build("gemma3")
    cache = CompressedCache(model, "knorm", 1.0)
    Reader(model, cache)(prompts((12,))[0])
    cache.layers[index].crop(-2)
    lengths = [layer.get_seq_length() for layer in cache.layers]
    with pytest.raises(KvfoldError, match="10 to 12 tokens"):
        Reader(model, cache)(continuation(1, 1))
    assert [layer.get_seq_length() for layer in cache.layers] == lengths


def broken(module):
    """Until the handle that is returned is removed, every call of `module` fails."""

    def fail(*args):
        raise RuntimeError("broken")

    return module.register_forward_pre_hook(fail)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("part", ["embed_tokens", "norm", "lm_head"])
def test_a_forward_that_failed_is_not_read_twice(part, steps):
    """Behind the last layer its tokens are stored: they are taken back, or nothing goes on."""
    model = build("llama", torch.float64)
    ids, tokens = prompts((12,))[0], continuation(1, 4).split(1, 1)
    reader, untouched = (Reader(model, CompressedCache(model, "full")) for _ in range(2))
    for piece in (ids, *tokens[:steps]):
        reader(piece), untouched(piece)
    handle = broken(dict(model.named_modules())[part if part == "lm_head" else f"model.{part}"])
    with pytest.raises(RuntimeError, match="broken"):
        reader(tokens[2])
    handle.remove()
    if part != "embed_tokens":
        for _ in range(2):
            with pytest.raises(KvfoldError, match=r"stored its 1 tokens: .*crop\(-1\)"):
                reader(tokens[2])
        reader.cache.crop(-1)
    for token in tokens[2:]:
        assert torch.equal(reader(token), untouched(token))
    assert reader.cache.stats() == untouched.cache.stats()


def test_recurrent_states_of_a_forward_that_failed_are_not_read_on():
    """Before the first layer of attention nothing tells by its length that states moved on."""
    model = build("qwen3_5", torch.float64)
    ids, tokens = prompts((12,))[0], continuation(1, 4).split(1, 1)
    reader, untouched = (Reader(model, CompressedCache(model, "full")) for _ in range(2))
    reader(ids), untouched(ids)
    handle = broken(model.model.layers[1])
    with reader.cache.frozen():
        with pytest.raises(RuntimeError, match="broken"):
            reader(tokens[0])
        reader.cache.crop(0)  # back to where the block began
    handle.remove()
    assert torch.equal(reader(tokens[0]), untouched(tokens[0]))
    handle = broken(model.model.layers[0])
    with pytest.raises(RuntimeError, match="broken"):
        reader(tokens[1])
    handle.remove()
    assert torch.equal(reader(tokens[1]), untouched(tokens[1]))  # no state had moved on yet
    handle = broken(model.model.layers[1])
    with pytest.raises(RuntimeError, match="broken"):
        reader(tokens[2])
    handle.remove()
    for cache in (reader.cache, fork(reader.cache)):
        for _ in range(2):
            with pytest.raises(KvfoldError, match=r"recurrent layers.*make a new cache"):
                Reader(model, cache)(tokens[2])
    reader.cache.reset()
    again = Reader(model, CompressedCache(model, "full"))
    assert torch.equal(reader(ids), again(ids))


def test_a_forward_that_failed_when_it_had_evicted_cannot_be_taken_back(model):
    reader = Reader(model, CompressedCache(model, "snapkv:window=8", 20))
    handle = broken(model.lm_head)
    with pytest.raises(RuntimeError, match="broken"):
        reader(prompts((64,))[0])
    handle.remove()
    with pytest.raises(KvfoldError, match="stored its 64 tokens"):
        reader(continuation(1, 1))
    with pytest.raises(KvfoldError, match="evicted"):
        reader.cache.crop(-64)
    reader.cache.reset()
    reader(prompts((64,))[0])


def test_forwards_are_watched_once_and_no_longer_when_disabled():
    model = build("llama")
    for _ in range(2):
        CompressedCache(model, "knorm", 20)
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    kvfold.disable(model)
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_after_an_error_while_reading_nothing_is_compressed(model):
    cache = CompressedCache(model, "snapkv:window=8", 20)
    with pytest.raises(RuntimeError, match="interrupted"), cache.reading():
        Reader(model, cache)(prompts((64,))[0])
        raise RuntimeError("interrupted")
    assert cache.stats().kept == [[[64, 64]]] * 4


@pytest.mark.parametrize("spans", [[(5, 5)], [(9, 3)], [(-2, 4)]])
def test_spans_that_protect_nothing_are_refused(model, spans):
    with pytest.raises(KvfoldError):
        CompressedCache(model, "knorm", 20, protect=spans)


def test_every_error_is_a_value_error():
    for kind in (BudgetError, UnsupportedModel, IllegalComposition, kvfold.ContextFileError):
        assert issubclass(kind, KvfoldError) and issubclass(kind, ValueError)


def test_after_an_error_in_the_middle_of_a_forward_the_cache_is_refused(model):
    cache = CompressedCache(model, "knorm:skip_layers=0/1", 0.2)
    reader = Reader(model, cache)
    with pytest.raises(BudgetError):
        reader(prompts((64,))[0])
    with pytest.raises(UnsupportedModel, match="last forward failed"):
        reader(continuation(1, 1))
