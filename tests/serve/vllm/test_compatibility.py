# SPDX-License-Identifier: Apache-2.0
"""A context fits the served model that made it, and no other."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from kvfold import ContextFileError, UnsupportedModel
from kvfold.serve.vllm.meta_model import INDEX, SINGLE, MetaModel
from kvfold.serve.vllm.placeholders import CompatibilityCheck
from tests.helpers.contexts import new_model
from tests.helpers.vllm import ROPES

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


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

    with pytest.raises(UnsupportedModel, match="or that hold something else"):
        MetaModel(config(family), None)
