# SPDX-License-Identifier: Apache-2.0
"""What `kvfold.generate` is given: names that are wrong, and inputs beside ids, such as images."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MinLengthLogitsProcessor,
)
from transformers.cache_utils import DynamicCache

import kvfold
from kvfold import CompressedCache, KvfoldError
from tests.helpers.models import build, prompts

GREEDY = {"max_new_tokens": 4, "do_sample": False}
IMAGE = 198  # the id that stands for a piece of an image


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def seeing():
    """A tiny random model that reads images."""
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE)
    made = LlavaForConditionalGeneration(config).eval()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 0
    return made


def with_image() -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt `[1, 40]` with an image, and the image."""
    ids = prompts((40,))[0]
    ids[ids == IMAGE] = 3
    ids[:, 5:21] = IMAGE
    return ids, torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def test_a_cache_under_transformers_name_is_refused(model):
    cache = CompressedCache(model, "knorm", 20)
    with pytest.raises(KvfoldError, match="as cache=, not as past_key_values="):
        kvfold.generate(model, prompts((64,))[0], past_key_values=cache, **GREEDY)


@pytest.mark.parametrize("cache", [None, "snapkv", DynamicCache()])
def test_what_is_no_cache_of_ours_is_refused(model, cache):
    with pytest.raises(KvfoldError, match=r"cache= .*CompressedCache\(.*model\.generate"):
        kvfold.generate(model, prompts((64,))[0], cache=cache, **GREEDY)


def test_a_prompt_without_ids_is_refused(model):
    with pytest.raises(KvfoldError, match="needs input_ids"):
        kvfold.generate(model, cache=CompressedCache(model, "knorm", 20), **GREEDY)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"attention_mask": [[1] * 64]}, "attention_mask is a tensor as input_ids are, not a list"),
        ({"generation_config": {"max_new_tokens": 2}}, "GenerationConfig, not a dict"),
        ({"logits_processor": MinLengthLogitsProcessor(2, 1)}, "logits_processor is a list"),
        ({"prefill_chunk": True}, "prefill_chunk is a positive number of tokens, not True"),
    ],
)
def test_options_of_another_kind_are_refused(model, given, reason):
    cache = CompressedCache(model, "knorm", 20)
    with pytest.raises(KvfoldError, match=reason):
        kvfold.generate(model, prompts((64,))[0], cache=cache, **given, **GREEDY)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("beside_ids", [False, True])
def test_embeddings_are_refused_and_the_way_that_is_named_works(model, beside_ids):
    ids = prompts((64,))[0]
    embedded = model.get_input_embeddings()(ids).detach()
    given = {"input_ids": ids} if beside_ids else {}
    with pytest.raises(KvfoldError, match=r"model\.generate\(inputs_embeds="):
        cache = CompressedCache(model, "snapkv", 40)
        kvfold.generate(model, **given, inputs_embeds=embedded, cache=cache, **GREEDY)
    expected = kvfold.generate(model, ids, cache=CompressedCache(model, "snapkv", 40), **GREEDY)
    cache = CompressedCache(model, "snapkv", 40)
    generated = model.generate(inputs_embeds=embedded, past_key_values=cache, **GREEDY)
    assert torch.equal(generated, expected[:, 64:])


@pytest.mark.parametrize("budget", [40, 64])
def test_an_image_is_read_with_its_prompt(seeing, budget):
    ids, image = with_image()
    expected = seeing.generate(ids, pixel_values=image, **GREEDY)
    cache = CompressedCache(seeing, "snapkv", budget)
    assert torch.equal(
        kvfold.generate(seeing, ids, cache=cache, pixel_values=image, **GREEDY), expected
    )
    other = kvfold.generate(
        seeing, ids, cache=CompressedCache(seeing, "snapkv", budget), pixel_values=-image, **GREEDY
    )
    assert not torch.equal(other, expected)


@pytest.mark.parametrize(
    ("spec", "options", "way_out"),
    [
        ("full", {"prefill_chunk": 16}, "leave out prefill_chunk="),
        ("full", {"prefill_chunk": 30}, "leave out prefill_chunk="),
        ("full", {"prefill_chunk": 16, "compress": "per_chunk"}, "leave out prefill_chunk="),
        ("full", {"prompt_lookup_num_tokens": 3}, "assisted decoding"),
        ("pyramidinfer", {}, "pyramidinfer runs forwards of its own"),
    ],
)
def test_an_image_that_would_be_left_out_is_refused(seeing, spec, options, way_out):
    ids, image = with_image()
    cache = CompressedCache(seeing, spec)
    with pytest.raises(KvfoldError, match=f"^pixel_values must reach the model.*{way_out}"):
        kvfold.generate(seeing, ids, cache=cache, pixel_values=image, **options, **GREEDY)
    assert cache.get_seq_length() == 0


def test_positions_that_would_be_left_out_are_refused(model):
    cache = CompressedCache(model, "full")
    places = torch.arange(64)[None] * 2
    with pytest.raises(KvfoldError, match=r"^position_ids must reach the model"):
        kvfold.generate(
            model,
            prompts((64,))[0],
            cache=cache,
            position_ids=places,
            prefill_chunk=16,
            **GREEDY,
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
        {"stop_strings": ["the"]},
    ],
)
def test_settings_of_the_model_that_a_cache_cannot_follow_are_refused(settings):
    model, ids = build("llama"), prompts((40,))[0]
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    cache = kvfold.CompressedCache(model, "snapkv:window=8", 20)
    with pytest.raises(KvfoldError, match=rf"{next(iter(settings))}.*model\.generation_config"):
        kvfold.generate(model, ids, cache=cache, max_new_tokens=3)
    assert cache.get_seq_length() == 0
