# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters: a cache goes on under those it was read under, and under no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from packaging.version import Version

import kvfold
from kvfold import CompressedCache, ContextFileError, KvfoldError, UnsupportedModel
from kvfold.hf.adapters import Adapters, active_adapters, adapters_of, parts_of
from kvfold.hf.versions import INSTALLED
from tests.helpers import image_models
from tests.helpers.caches import GREEDY
from tests.helpers.contexts import DOCUMENT, QUESTION
from tests.helpers.models import build, continuation, prompts
from tests.helpers.packages import Package
from tests.helpers.tokenizers import word_tokenizer
from tests.helpers.truth import Reader, stock_cache

peft = Package("peft", optional=True)
SPEC = "snapkv:window=8"


def lora() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def add_adapter(model: Any, config: Any, name: str) -> None:
    """`model.add_adapter`, for which transformers 5.24 asks for a PEFT that is not released."""
    if Version("5.24") <= INSTALLED and Version(peft.__version__) < Version("0.22"):
        pytest.skip("transformers' own adapters need PEFT 0.22 from 5.24 on")
    model.add_adapter(config, name)


def adapted() -> Any:
    """A model with the adapters "law" and "code", of which the first is on."""
    model = build("llama")
    torch.manual_seed(1)
    for name in ("law", "code"):
        add_adapter(model, lora(), name)
    model.set_adapter("law")
    return model.eval()


SWITCHES = {
    "under the adapter code": lambda model: model.set_adapter("code"),
    "without an adapter": lambda model: model.disable_adapters(),
    "under the adapter law, code": lambda model: model.set_adapter(["law", "code"]),
}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_without_adapters_has_none(family):
    assert active_adapters(build(family)) == ()


@pytest.mark.parametrize("now", SWITCHES)
def test_another_adapter_is_refused_and_the_first_one_goes_on(now):
    model, ids = adapted(), prompts((64,))[0]
    cache = CompressedCache(model, SPEC, 1.0)
    stock = Reader(adapted(), stock_cache(model))
    reader = Reader(model, cache)
    assert torch.equal(reader(ids), stock(ids))
    SWITCHES[now](model)
    with pytest.raises(KvfoldError, match=f"under the adapter law, and the model now runs {now}"):
        reader(continuation(1, 1))
    with pytest.raises(KvfoldError, match=now):
        kvfold.generate(model, torch.cat([ids, continuation(1, 3)], 1), cache=cache)
    fresh = CompressedCache(model, SPEC, 20)
    Reader(model, fresh)(ids)
    model.enable_adapters()
    model.set_adapter("law")
    assert torch.equal(reader(continuation(1, 5)), stock(continuation(1, 5)))


def test_an_adapter_loaded_in_mid_chat_is_refused():
    model, ids = build("llama"), prompts((64,))[0]
    reader = Reader(model, CompressedCache(model, SPEC, 20))
    reader(ids)
    add_adapter(model, peft.LoraConfig(r=4, target_modules=["q_proj"]), "late")
    with pytest.raises(KvfoldError, match=r"without an adapter, and .* under the adapter late"):
        reader(continuation(1, 1))
    model.disable_adapters()
    reader(continuation(1, 1))


def test_adapters_of_peft_s_own_model_are_told_apart():
    model, ids = build("llama"), prompts((64,))[0]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    cache = CompressedCache(wrapped, SPEC, 20)
    with torch.no_grad():
        wrapped(input_ids=ids, past_key_values=cache)
        with wrapped.disable_adapter(), pytest.raises(KvfoldError, match="without an adapter"):
            wrapped(input_ids=continuation(1, 1), past_key_values=cache)


def test_a_merged_adapter_is_in_effect_whichever_is_switched_on():
    wrapped = peft.get_peft_model(build("llama"), lora(), "law")
    wrapped.add_adapter("code", lora())
    reader = Reader(wrapped, CompressedCache(wrapped, SPEC, 20))
    reader(prompts((64,))[0])
    wrapped.merge_adapter(["code"])
    with pytest.raises(KvfoldError, match=r"under the adapter law, .* under the adapter code"):
        reader(continuation(1, 1))
    wrapped.unmerge_adapter()
    reader(continuation(1, 1))


def test_rows_with_adapters_of_their_own_are_refused():
    wrapped = peft.get_peft_model(build("llama"), lora(), "law").eval()
    ids, mask = prompts((64, 40))
    cache = CompressedCache(wrapped, SPEC, 20)
    options = {"attention_mask": mask, "adapter_names": ["law", "__base__"], **GREEDY}
    with pytest.raises(KvfoldError, match="adapter_names= gives rows adapters of their own"):
        kvfold.generate(wrapped, ids, cache=cache, **options)
    with torch.no_grad(), pytest.raises(KvfoldError, match="adapter_names= gives rows"):
        wrapped(input_ids=ids, past_key_values=cache, adapter_names=["law", "__base__"])
    assert cache.get_seq_length() == 0


@pytest.mark.slow
def test_adapters_that_begin_at_tokens_are_refused():
    plain = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(build("llama"), plain).eval()
    cache = CompressedCache(wrapped, SPEC, 20)
    wrapped.add_adapter("late", replace(plain, alora_invocation_tokens=[7, 8]))
    wrapped.set_adapter("late")
    with pytest.raises(UnsupportedModel, match=r"aLoRA\) begins at tokens"):
        kvfold.generate(wrapped, prompts((64,))[0], cache=cache, prefill_chunk=16, **GREEDY)
    assert cache.get_seq_length() == 0
    with pytest.raises(UnsupportedModel, match=r"aLoRA\) begins at tokens"):
        CompressedCache(peft.get_peft_model(build("llama"), wrapped.peft_config["late"]), SPEC, 20)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_learned_prompts_are_refused(kind):
    learned = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    wrapped = peft.get_peft_model(build("llama"), learned)
    with pytest.raises(UnsupportedModel, match=r"learned tokens .* such as LoRA$"):
        CompressedCache(wrapped, SPEC, 20)


@pytest.mark.parametrize(("spec", "chunk"), [(SPEC, 16), ("kvzip", None)])
def test_images_of_peft_s_own_model_are_not_left_out(spec, chunk):
    given = image_models.prompt("llava", (64,))
    wrapped = peft.get_peft_model(image_models.build("llava"), lora()).double().eval()
    cache = CompressedCache(wrapped, SPEC, 1.0)
    made = kvfold.generate(wrapped, cache=cache, **given, **GREEDY)
    assert torch.equal(made, wrapped.generate(**given, **GREEDY))
    cache = CompressedCache(wrapped, spec, 40, tokenizer=word_tokenizer())
    with pytest.raises(KvfoldError, match="pixel_values must reach the model together"):
        kvfold.generate(wrapped, cache=cache, prefill_chunk=chunk, **given, **GREEDY)


def test_a_context_is_neither_saved_nor_continued_under_another_adapter(tmp_path):
    model, tokenizer = adapted(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, DOCUMENT, SPEC, 40)
    context.save(tmp_path / "law.kvfold")
    loaded = kvfold.load(tmp_path / "law.kvfold", model, tokenizer)
    model.set_adapter("code")
    with pytest.raises(KvfoldError, match=r"under the adapter law, .* under the adapter code"):
        context.save(tmp_path / "code.kvfold")
    assert not (tmp_path / "code.kvfold").exists()
    with pytest.raises(KvfoldError, match=r"under the adapter law, .* under the adapter code"):
        loaded.ask(QUESTION, max_new_tokens=4)


def test_a_context_file_is_of_the_adapters_it_was_made_under(tmp_path):
    model, tokenizer = adapted(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, DOCUMENT, SPEC, 40)
    expected = context.ask(QUESTION, max_new_tokens=4)
    context.save(tmp_path / "law.kvfold")
    loaded = kvfold.load(tmp_path / "law.kvfold", model, tokenizer)
    assert loaded.ask(QUESTION, max_new_tokens=4) == expected
    model.set_adapter("code")
    with pytest.raises(ContextFileError, match="other weights"):
        kvfold.load(tmp_path / "law.kvfold", model, tokenizer)
    with pytest.raises(KvfoldError, match="under the adapter law"):
        context.ask(QUESTION, max_new_tokens=4)


def scaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("law", 9.0)


def swapped(model: Any) -> None:
    for name, weight in model.named_parameters():
        if "lora_B.law" in name:
            weight.data.copy_(weight.data + 1)  # as PEFT's hot swap does


def trained(model: Any) -> None:
    with torch.no_grad():
        next(each for name, each in model.named_parameters() if "lora_B.law" in name).add_(1)


def added_again(model: Any) -> None:
    model.delete_adapter("law")
    torch.manual_seed(7)
    add_adapter(model, lora(), "law")
    model.set_adapter("law")


CHANGES = [scaled, swapped, trained, added_again]


@pytest.mark.parametrize("change", CHANGES)
def test_an_adapter_that_was_changed_is_refused_in_each_later_turn(change, tmp_path):
    model, tokenizer = adapted(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, DOCUMENT, SPEC, 40)
    chat = context.chat()
    chat.ask(QUESTION, max_new_tokens=3)
    context.save(tmp_path / "law.kvfold")
    change(model)
    for call in (
        lambda: context.ask(QUESTION, max_new_tokens=3),
        lambda: chat.ask(QUESTION, max_new_tokens=3),
        lambda: context.save(tmp_path / "mixed.kvfold"),
    ):
        with pytest.raises(KvfoldError, match="weights or scales are others now"):
            call()
    assert not (tmp_path / "mixed.kvfold").exists()
    with pytest.raises(ContextFileError, match="other weights"):
        kvfold.load(tmp_path / "law.kvfold", model, tokenizer)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("whole", [True, False])
def test_a_turn_of_one_token_in_plain_generate_is_none_of_a_turns_steps(change, whole):
    model, text = adapted(), torch.cat([prompts((64,))[0], continuation(1, 1)], 1)
    cache = CompressedCache(model, SPEC, 20)
    with torch.no_grad():
        model(text[:, :64], past_key_values=cache)
    change(model)
    given = text if whole else text[:, 64:]
    with pytest.raises(KvfoldError, match="whose weights or scales are others"):
        model.generate(given, attention_mask=torch.ones_like(text), past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == 64


def test_a_scale_that_changed_is_refused_in_a_forward_of_one_token():
    model, ids = adapted(), prompts((64,))[0]
    reader = Reader(model, CompressedCache(model, SPEC, 20))
    reader(ids)
    scaled(model)
    with pytest.raises(KvfoldError, match="weights or scales are others now"):
        reader(continuation(1, 1))


@pytest.mark.slow
def test_a_context_of_another_lora_alpha_is_refused(tmp_path):
    def of(alpha: float) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, lora_alpha=alpha, target_modules=["q_proj"], init_lora_weights=False
        )
        return peft.get_peft_model(build("llama"), config).eval()

    kvfold.compress(of(1), word_tokenizer(), DOCUMENT, SPEC, 40).save(tmp_path / "a")
    kvfold.load(tmp_path / "a", of(1), word_tokenizer())
    with pytest.raises(ContextFileError, match="other weights or scales of its adapters"):
        kvfold.load(tmp_path / "a", of(400), word_tokenizer())


def test_an_older_file_that_names_its_adapter_only_is_refused(tmp_path, monkeypatch):
    model, tokenizer = adapted(), word_tokenizer()
    context = kvfold.compress(model, tokenizer, DOCUMENT, SPEC, 40)
    with monkeypatch.context() as patch:
        patch.setattr(Adapters, "spelled", lambda adapters: "+law")
        context.save(tmp_path / "old.kvfold")
    with pytest.raises(ContextFileError, match="older file does not name: compress again"):
        kvfold.load(tmp_path / "old.kvfold", model, tokenizer)


@pytest.mark.parametrize("kind", ["dora", "ia3", "vera", "modules"])
def test_other_kinds_of_adapters_are_told_apart_by_their_tensors(kind):
    config = {
        "dora": peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
        "ia3": peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        "vera": peft.VeraConfig(r=4, target_modules=["q_proj"]),
        "modules": peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    }[kind]
    wrapped = peft.get_peft_model(build("llama"), config).eval()
    seen = set[str]()
    own = [each for each in wrapped.named_parameters() if "default" in each[0]]
    for _, weight in own:
        seen.add(adapters_of(parts_of(wrapped).layers).spelled())
        weight.data.add_(1)
    seen.add(adapters_of(parts_of(wrapped).layers).spelled())
    assert len(seen) == len(own) + 1 > 1
