# SPDX-License-Identifier: Apache-2.0
"""References to a layer: they keep no model alive, and travel with caches and files."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest

from kvfold.errors import UnsupportedModel
from kvfold.hf.models import LayerOfModel
from tests.helpers.models import build


def test_a_reference_names_its_layers_attention_until_the_model_is_gone():
    model = build("llama")
    layer = LayerOfModel(model, 1)
    assert layer.model is model and layer.attention is model.model.layers[1].self_attn
    assert copy.deepcopy(layer) is layer
    del model
    gc.collect()
    with pytest.raises(UnsupportedModel, match="is gone"):
        layer.attention  # noqa: B018


def test_a_file_holds_the_layers_number_alone():
    loaded = pickle.loads(pickle.dumps(LayerOfModel(build("llama"), 1)))
    assert loaded.layer == 1
    with pytest.raises(UnsupportedModel, match="is gone"):
        loaded.model  # noqa: B018
