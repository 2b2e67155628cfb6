# SPDX-License-Identifier: Apache-2.0
"""A context file is read with the model and the tokenizer that it was written with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvfold
from kvfold import ContextFileError
from kvfold.contexts.files.format import read_header
from kvfold.hf.identity import model_header
from tests.helpers.contexts import DOCUMENT, new_model, rewritten
from tests.helpers.tokenizers import word_tokenizer

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 here, 2 in the file"),
        ("granite", {"embedding_multiplier": 3.0}, "embedding_multiplier 3.0 here, 1.0 in the"),
        ("granite", {"residual_multiplier": 0.3}, "residual_multiplier 0.3 here, 1.0 in the file"),
        ("deepseek_v3", {"routed_scaling_factor": 1.0}, "routed_scaling_factor 1.0 here, 2.5 in"),
        ("gemma3", {"final_logit_softcapping": 0.5}, "final_logit_softcapping 0.5 here, None"),
    ],
    ids=str,
)
def test_the_same_weights_in_another_computation_are_refused(
    tokenizer, tmp_path, family, changes, named
):
    model, other, path = new_model(family), new_model(family, **changes), tmp_path / "a.kvfold"
    weights = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in weights)
    kvfold.compress(model, tokenizer, DOCUMENT, "full").save(path)
    with pytest.raises(ContextFileError, match="was made with another model") as refusal:
        kvfold.load(path, other, tokenizer)
    assert named in str(refusal.value)
    # A file that names no such setting is older.
    model_part = read_header(path).model.model_dump()
    for name in changes:
        del model_part["config"][name]
    older = rewritten(tmp_path / "older.kvfold", path, model=model_part)
    kvfold.load(older, other, tokenizer)


def test_the_bundled_model_s_hash_is_that_of_the_published_records():
    record = next(iter((ROOT / "docs/results/bundled/records.jsonl").open()))
    assert model_header(kvfold.bundled_model()[0]).config_hash in record


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


def test_offloaded_weights_are_refused_in_one_line(tokenizer):
    model = new_model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to("meta"))
    with pytest.raises(kvfold.KvfoldError, match="offloaded"):
        model_header(model, tokenizer)
