# SPDX-License-Identifier: Apache-2.0
"""Identity of the model that made a file: configuration, weights, vocabulary and RoPE.

Keys and values depend on all weights and on the computation. `FIELDS` are the settings of a
configuration that affect the computation; others (names, dropout, special tokens, trained length)
do not. RoPE is compared separately, by its frequencies. Weights are compared by a checksum over a
sample of each, which tells models of one architecture apart without reading all weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.hf.models import full_weight, text_config
from kvfold.hf.rotation import rope_of

FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_types",
    "sliding_window",
    "attention_chunk_size",
    "num_kv_shared_layers",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
)
# Elements of each weight in the checksum, and relative tolerance of RoPE frequencies.
SAMPLE, CLOSE = 64, 1e-5


class HeaderPart(BaseModel):
    """Part of a file's header."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelHeader(HeaderPart):
    """The model that read the document; compared by `model_differences`."""

    name: str
    config: dict[str, Any]
    config_hash: str
    weights: str
    vocabulary: str


class RopeHeader(HeaderPart):
    """RoPE of the stored keys; its frequencies are tensors of the file.

    `moved`: positions by which keys were rotated beyond their original positions.
    """

    parameters: dict[str, Any]
    scaling: dict[str, float]
    moved: int


def model_header(model: PreTrainedModel, tokenizer: Any = None) -> ModelHeader:
    """Identity of the model and of its tokenizer's vocabulary, "" without a tokenizer."""
    config = text_config(model)
    fields = {name: getattr(config, name, None) for name in FIELDS}
    kept = {name: value for name, value in fields.items() if value is not None}
    # Round trip through JSON, as in a file, so that both compare equal.
    kept = json.loads(json.dumps(kept))
    return ModelHeader(
        name=type(model).__name__,
        config=kept,
        config_hash=digest(json.dumps(kept, sort_keys=True)),
        weights=checksum(model.named_parameters()),
        vocabulary="" if tokenizer is None else _vocabulary(tokenizer),
    )


def _vocabulary(tokenizer: Any) -> str:
    return digest(json.dumps(sorted(tokenizer.get_vocab().items())))


def digest(text: str) -> str:
    """Checksum of a text: BLAKE2b, 16 bytes, hexadecimal."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digest_of(tensor: Tensor) -> str:
    """Checksum of a CPU tensor's dtype, shape and bytes."""
    made = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)} ".encode(), digest_size=16)
    made.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return made.hexdigest()


def checksum(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Checksum over names, shapes and a sample of elements of all weights, in their order."""
    made = hashlib.blake2b(digest_size=16)
    for name, weight in weights:
        flat = full_weight(weight.detach()).flatten()
        sample = flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].contiguous().cpu()
        made.update(f"{name} {list(weight.shape)} ".encode())
        made.update(sample.view(torch.uint8).numpy().data)
    return made.hexdigest()


def rope_header(model: PreTrainedModel) -> tuple[RopeHeader, dict[str, Tensor]]:
    """RoPE parameters of the model, and its frequencies by name."""
    parameters, frequencies, scaling = rope_of(model)
    parameters = json.loads(json.dumps(parameters))
    return RopeHeader(parameters=parameters, scaling=scaling, moved=0), frequencies


def model_differences(here: ModelHeader, there: ModelHeader, weights: bool) -> list[str]:
    """Differences between this model and the file's, in words; `weights` compares these, too."""
    found = differences(here.config, there.config)
    if here.name != there.name:
        found.insert(0, f"a {here.name} here, a {there.name} in the file")
    if not found and weights and here.weights != there.weights:
        found.append("the same configuration, but other weights")
    if "" not in (here.vocabulary, there.vocabulary) and here.vocabulary != there.vocabulary:
        found.append("another vocabulary of the tokenizer")
    return found


def rope_differences(
    here: RopeHeader, there: RopeHeader, mine: dict[str, Tensor], theirs: dict[str, Tensor]
) -> list[str]:
    """Differences between this model's RoPE and the file's, in words.

    `mine` and `theirs` are the frequencies by name.
    """
    found = differences(here.parameters, there.parameters)
    found += differences(here.scaling, there.scaling, " of the attention")
    same = mine.keys() == theirs.keys() and all(
        mine[name].shape == theirs[name].shape
        and torch.allclose(mine[name].cpu().float(), theirs[name].float(), rtol=CLOSE, atol=0)
        for name in mine
    )
    if not found and not same:
        found.append("other frequencies")
    if there.moved:
        found.append(f"keys moved by {there.moved} positions in the file")
    return found


def differences(here: dict[str, Any], there: dict[str, Any], of: str = "") -> list[str]:
    """Settings that differ, in words, with both values; `of` follows each name."""
    return [
        f"{name}{of} {here.get(name)!r} here, {there.get(name)!r} in the file"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
