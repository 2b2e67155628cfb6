# SPDX-License-Identifier: Apache-2.0
"""Models that kvfold cannot answer for are refused, with a reason and a way out."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GitConfig,
    GitForCausalLM,
    Kosmos2Config,
    Kosmos2ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_utils import AttentionInterface

import kvfold
from kvfold import CompressedCache, KvfoldError, UnsupportedModel
from kvfold.cache import model_trial
from kvfold.hf.attention import NAMES
from kvfold.hf.versions import INSTALLED
from tests.helpers.models import WITHOUT_INTERFACE, WITHOUT_OUR_CACHE, build, prompts
from tests.helpers.truth import Reader


@pytest.fixture
def model():
    return build("llama")


def small(kind):
    """A tiny configuration of a model that reads images."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2}
    if kind is GitForCausalLM:
        return GitConfig(vision_config={**sizes, "image_size": 32}, vocab_size=99, **sizes)
    text = {"embed_dim": 32, "layers": 2, "ffn_dim": 32, "attention_heads": 2, "vocab_size": 99}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    return Kosmos2Config(text_config=text, vision_config=vision, latent_query_num=2)


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_models_that_compute_attention_themselves_are_refused(name):
    if name == "gptj" and Version("5.24.0") <= INSTALLED:
        pytest.skip("GPT-J has transformers' attention interface from 5.24 on")
    model = build(name)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match="attention itself"):
        CompressedCache(model, "snapkv", 64)
    assert model.config._attn_implementation == before


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_OUR_CACHE)
def test_models_that_would_be_answered_wrongly_are_refused_when_a_cache_is_made(name):
    model = build(name)
    before = model.config._attn_implementation
    for spec in ("knorm", "h2o", "knorm"):
        with pytest.raises(UnsupportedModel, match=r"cannot tell what|not with a cache of kvfold"):
            CompressedCache(model, spec, 20)
    assert model.config._attn_implementation == before


def test_a_model_with_layers_of_two_kinds_in_one_is_refused_before_a_forward():
    config = FalconH1Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, mamba_d_ssm=64, mamba_n_heads=4,
        mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    forwards = []
    model.register_forward_pre_hook(lambda *given: forwards.append(given))
    with pytest.raises(UnsupportedModel, match="LinearAttentionAndFullAttentionLayer, which kvfol"):
        CompressedCache(model, "snapkv", 64)
    assert not forwards


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
    monkeypatch.setattr(model_trial, "read_tokens", lambda *_: None)
    with pytest.raises(UnsupportedModel, match="does not write every token"):
        CompressedCache(model, "knorm", 20)


def test_encoder_decoders_are_refused():
    config = T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, pad_token_id=0
    )
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        CompressedCache(T5ForConditionalGeneration(config), "snapkv", 64)


def test_a_model_whose_layers_all_slide_is_refused():
    model = build("mistral", sliding_window=16)
    with pytest.raises(UnsupportedModel, match=r"slide, and hold 16 tokens.* nothing to compress"):
        CompressedCache(model, "snapkv", 64)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_a_refused_model_reads_no_text_or_no_cache_of_kvfolds():
    for name, kind, reason in (
        ("minimax", None, "reads text, but not with a cache of kvfold's: MiniMax uses cache of"),
        (None, GitForCausalLM, "attends to its cache without transformers' attention interface"),
        (None, Kosmos2ForConditionalGeneration, "cannot read text alone: You have to specify"),
    ):
        model = build(name) if name else kind(small(kind))
        with pytest.raises(UnsupportedModel, match=reason):
            CompressedCache(model, "snapkv", 64)


def test_a_window_is_compared_with_the_length_after_rope_scaling():
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    yarn["original_max_position_embeddings"] = 64
    wide = build("mistral", max_position_embeddings=64, sliding_window=256, rope_parameters=yarn)
    assert len(CompressedCache(wide, "snapkv", 64).states) == 4
    changes = {"max_position_embeddings": 64, "sliding_window": 128, "rope_parameters": yarn}
    with pytest.raises(UnsupportedModel, match=r"slide, and hold 128 tokens"):
        CompressedCache(build("mistral", **changes), "snapkv", 64)


def test_a_text_that_would_fill_a_wide_window_is_refused():
    model = build("mistral", max_position_embeddings=64, sliding_window=70)

    def made(tokens, new, **options):
        cache, ids = CompressedCache(model, "snapkv:window=8", 30), prompts((tokens,))[0]
        options |= {"allow_longer": True, "max_new_tokens": new, "min_new_tokens": new}
        return kvfold.generate(model, ids, cache=cache, **options)

    assert made(68, 3).shape == (1, 71)  # the last token is not read
    for tokens, new, options in ((68, 4, {}), (71, 1, {}), (68, 4, {"compile": True})):
        with pytest.raises(KvfoldError, match=r"slide from 70 on.* shorten the text"):
            made(tokens, new, **options)


def test_a_model_whose_forward_takes_no_cache_is_refused(model, monkeypatch):
    """`generate` goes on as if such a model had its cache, and its answers are wrong."""

    def forward(self, input_ids=None, **kwargs):
        raise AssertionError("it was run")

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(UnsupportedModel, match="takes no past_key_values"):
        CompressedCache(model, "snapkv", 64)
    assert model.config._attn_implementation == "sdpa"
