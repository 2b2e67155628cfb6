# SPDX-License-Identifier: Apache-2.0
"""Sliding and recurrent layers of context files, loaded in part or refused."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold import ContextFileError
from tests.helpers.contexts import DOCUMENT, contents, forged, new_model, rewritten


def test_a_recurrent_state_is_not_loaded_in_part(tokenizer, tmp_path):
    model = new_model("qwen3_5")
    kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40).save(tmp_path / "a.kvfold")
    with pytest.raises(ContextFileError, match="a state without heads"):
        kvfold.load(tmp_path / "a.kvfold", model, tokenizer, heads=slice(0, 1))


def test_sliding_layers_are_loaded_in_part(tokenizer, tmp_path):
    model = new_model("gemma3")
    context = kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40)
    context.save(tmp_path / "a.kvfold")
    part = kvfold.load(tmp_path / "a.kvfold", model, tokenizer, heads=slice(1, 2))
    sliding = [i for i, layer in enumerate(part.cache.layers) if layer.is_sliding]
    assert sliding
    for i in sliding:
        assert torch.equal(part.cache.layers[i].keys, context.cache.layers[i].keys[:, 1:])


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_tensors_of_other_layers_that_do_not_fit_are_refused(tokenizer, tmp_path, family):
    model, path = new_model(family), tmp_path / "a"
    kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40).save(path)
    for name, tensor in contents(path)[0].items():
        if not name.startswith("others.0.") or "tensor" in name:
            continue
        for other in (tensor[None], tensor[..., :-1], tensor[:-1], torch.cat([tensor, tensor])):
            altered = forged(tmp_path / "b", path, name, other.clone())
            with pytest.raises(ContextFileError, match="is damaged, its layers do not fit"):
                kvfold.load(altered, model, tokenizer)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_attributes_that_are_left_out_are_refused(tokenizer, tmp_path, family):
    model, path = new_model(family), tmp_path / "a"
    kvfold.compress(model, tokenizer, DOCUMENT, "snapkv", 40).save(path)
    first, *rest = contents(path)[1]["others"]
    for numbers in ({}, {n: v for n, v in first["numbers"].items() if not isinstance(v, int)}):
        others = [first | {"numbers": numbers}, *rest]
        altered = rewritten(tmp_path / "b", path, others=others)
        with pytest.raises(ContextFileError, match=r"is damaged, .* cannot have"):
            kvfold.load(altered, model, tokenizer)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "llama4"])
@pytest.mark.parametrize("words", [1, 15, 16, 17, 40])
def test_texts_of_any_length_come_back(tokenizer, tmp_path, family, words):
    model, text = new_model(family), " ".join(DOCUMENT.split()[:words])
    context = kvfold.compress(model, tokenizer, text, "snapkv:window=4", 40)
    context.save(tmp_path / "a")
    loaded = kvfold.load(tmp_path / "a", model, tokenizer)
    assert loaded.ask("the sky") == context.ask("the sky")
