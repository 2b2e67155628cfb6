# SPDX-License-Identifier: Apache-2.0
"""A context file is read with the model and the tokenizer that it was written with."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold import ContextFileError
from tests.helpers.contexts import new_model
from tests.helpers.tokenizers import word_tokenizer


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers 3 here, 4 in the file"),
        ({"intermediate_size": 64}, "intermediate_size 64 here, 96 in the file"),
        ({"seed": 5}, "the same configuration, but other weights"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            "another RoPE: rope_theta 500.0 here, 10000.0 in the file",
        ),
    ],
    ids=str,
)
def test_another_model_is_refused_by_what_differs(tokenizer, saved, changes, named):
    other = new_model(**changes)
    with pytest.raises(ContextFileError, match="was made with another") as refusal:
        kvfold.load(saved, other, tokenizer)
    assert named in str(refusal.value)


def test_another_family_is_refused(tokenizer, saved):
    with pytest.raises(ContextFileError, match="a MistralForCausalLM here, a LlamaForCausalLM in"):
        kvfold.load(saved, new_model("mistral"), tokenizer)


def test_other_frequencies_are_refused(tokenizer, saved):
    model = new_model()
    model.model.rotary_emb.original_inv_freq *= 1.001
    with pytest.raises(ContextFileError, match="another RoPE: other frequencies"):
        kvfold.load(saved, model, tokenizer)


def test_another_dtype_is_refused(tokenizer, saved):
    model = new_model()
    half = model.to(torch.bfloat16)
    with pytest.raises(ContextFileError, match="holds float32, and the model computes in bfloat16"):
        kvfold.load(saved, half, tokenizer)


def test_another_tokenizer_is_refused(model, saved):
    other = word_tokenizer()
    other.add_tokens(["more"])
    with pytest.raises(ContextFileError, match="another vocabulary of the tokenizer"):
        kvfold.load(saved, model, other)
