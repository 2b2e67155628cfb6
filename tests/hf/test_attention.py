# SPDX-License-Identifier: Apache-2.0
"""Which attention an enabled model computes, and that a disabled one is stock again."""

from __future__ import annotations

import contextlib

import pytest
import torch
import transformers

import kvfold
from kvfold import CompressedCache, UnsupportedModel
from kvfold.hf.attention import NAMES, attention_name
from tests.helpers import image_models
from tests.helpers.caches import GREEDY
from tests.helpers.models import build, config, continuation, prompts
from tests.helpers.truth import Reader, stock_cache


@pytest.fixture
def model():
    return build("llama")


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


@pytest.mark.slow
def test_the_image_encoder_keeps_the_attention_it_was_loaded_with():
    model = image_models.build("llava")
    model.set_attn_implementation({"vision_config": "eager"})
    kvfold.enable(model)
    assert model.config.text_config._attn_implementation == NAMES["sdpa"]
    assert model.config.vision_config._attn_implementation == "eager"
    kvfold.disable(model)
    for part in (model.config, model.config.text_config):
        assert part._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("loaded", [None, "flex_attention"])
def test_models_without_sdpa_work_as_transformers_loads_them(name, loaded):
    options = {} if loaded is None else {"attn_implementation": loaded}
    model = transformers.AutoModelForCausalLM.from_config(config(name), **options).eval()
    used = "sdpa" if model._supports_sdpa else "eager"  # Gemma 2 in transformers 5.15 does
    warned = pytest.warns(UserWarning, match=f"with '{used}'")
    with contextlib.nullcontext() if loaded is None else warned:
        cache = CompressedCache(model, "snapkv:window=8", 20)
    reader = Reader(model, cache)
    reader(prompts((64,))[0])
    assert torch.isfinite(reader(continuation(1, 1))).all()
    assert attention_name(model) == used


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
