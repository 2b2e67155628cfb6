# SPDX-License-Identifier: Apache-2.0
"""Sliding and recurrent layers of context files, loaded in part or refused."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold import ContextFileError
from tests.helpers.contexts import DOCUMENT, new_model


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
