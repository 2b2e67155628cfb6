# SPDX-License-Identifier: Apache-2.0
"""Identity of the model that made a file: configuration, weights, vocabulary and RoPE.

Keys and values depend on all weights and on the computation. `FIELDS` and `ADDED` are the settings
of a configuration that affect the computation; others (names, dropout, special tokens, trained
length) do not. RoPE is compared separately, by its frequencies. Weights are compared by a checksum
over a sample of each, which tells models of one architecture apart without reading all weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvfold.errors import KvfoldError
from kvfold.hf.adapters import Adapters, ModelParts, adapters_of, parts_of
from kvfold.hf.header import ADDED, ModelHeader, RopeHeader, digest
from kvfold.hf.models import full_weight, text_config
from kvfold.hf.rotation import rope_of
from kvfold.kernels.full_precision import full_precision

FIELDS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
    "layer_norm_eps", "layer_types", "sliding_window", "attention_chunk_size",
    "num_kv_shared_layers", "attn_logit_softcapping", "query_pre_attn_scalar",
    "attention_multiplier", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
    "v_head_dim",
)  # fmt: skip
SAMPLE = 64  # elements of each weight in the checksum
RUNS = 8  # places in a weight whose elements are compared at the beginning of a turn
ORIGINAL = "original_inv_freq"  # frequencies of short texts, where they follow the length


def model_header(model: PreTrainedModel, tokenizer: Any = None) -> ModelHeader:
    """Identity of the model and of its tokenizer's vocabulary, "" without a tokenizer."""
    kept = computation(text_config(model))
    return ModelHeader(
        name=type(model).__name__,
        config=kept,
        config_hash=digest(json.dumps(kept, sort_keys=True)),
        weights=checksum(model.named_parameters()) + adapters_of(parts_of(model).layers).spelled(),
        vocabulary="" if tokenizer is None else vocabulary(tokenizer),
    )


@dataclass(frozen=True)
class ReadBy:
    """The reader of a cache: adapters, a sample of each weight, and RoPE."""

    adapters: Adapters
    weights: bytes
    rope: bytes

    def change(self, now: ReadBy) -> str | None:
        """The part that is another `now`, in words; None without any."""
        if self.adapters.names != now.adapters.names:
            return f"was read {self.adapters}, and the model now runs {now.adapters}"
        if self.adapters != now.adapters:
            return f"was read {self.adapters}, whose weights or scales are others now"
        changed = "weights have" if self.weights != now.weights else "RoPE has"
        return None if self == now else f"was read by a model whose {changed} changed since"


def read_by(parts: ModelParts, rope_is_fixed: bool) -> ReadBy:
    """The parts that a forward of a model reads by now.

    Offloaded and quantized weights are left out: these are not there, or slow to sample, and none
    is trained. RoPE that is not fixed follows the length of the last text.
    """
    own, layers = parts
    weights, frequencies, factors = list[Tensor](), list[Tensor](), list[Any]()
    for module in own:
        weights += [each for each in module._parameters.values() if each is not None]
        for name, buffer in module._buffers.items():
            if buffer is not None and name.endswith("inv_freq" if rope_is_fixed else ORIGINAL):
                frequencies.append(buffer)
                factors += [v for k, v in vars(module).items() if k.endswith("attention_scaling")]
    rope = sampled(frequencies) + repr(factors).encode()
    return ReadBy(adapters_of(layers), sampled(weights), rope)


@full_precision
@torch.no_grad()
def sampled(tensors: Iterable[Tensor]) -> bytes:
    """Up to `SAMPLE` elements of each tensor, by one copy from each device.

    They lie in few places, as memory takes longer than all else.
    """
    made = dict[tuple[torch.device, torch.dtype], list[Tensor]]()
    for tensor in tensors:
        own: Tensor = tensor if type(tensor) is nn.Parameter else _local(tensor)
        count = own.numel()
        if count and not own.is_meta and type(own) in (Tensor, nn.Parameter):
            made.setdefault((own.device, own.dtype), []).append(_some(own, count))
    joined = (torch.cat(each).cpu().view(torch.uint8) for each in made.values())
    return b"".join(each.numpy().tobytes() for each in joined)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def _some(tensor: Tensor, count: int) -> Tensor:
    if not tensor.is_contiguous() or count < SAMPLE:
        return tensor.flatten()[:SAMPLE]
    return tensor.as_strided((RUNS, SAMPLE // RUNS), (count // RUNS, 1)).flatten()


def computation(config: Any) -> dict[str, Any]:
    """The settings of a configuration that affect the computation, as in a file."""
    found = {name: getattr(config, name, None) for name in FIELDS}
    found = {name: value for name, value in found.items() if value is not None}
    # None is named, too: a file that lacks one of these is older.
    found |= {name: getattr(config, name) for name in ADDED if hasattr(config, name)}
    settings: dict[str, Any] = json.loads(json.dumps(found))
    return settings


def answering(model: PreTrainedModel, tokenizer: Any) -> str:
    """Digest of what changes answers beside `model_header`: RoPE, generation settings, template."""
    config = text_config(model).to_dict()
    rope = {name: value for name, value in config.items() if name.startswith("rope")}
    settings = model.generation_config.to_dict() if model.can_generate() else {}
    settings.pop("transformers_version", None)
    template = getattr(tokenizer, "chat_template", None)
    return digest(json.dumps([rope, settings, template], sort_keys=True, default=str))


def vocabulary(tokenizer: Any) -> str:
    """The checksum of a tokenizer's vocabulary, as in `ModelHeader`."""
    return digest(json.dumps(sorted(tokenizer.get_vocab().items())))


def check_identifiable(model: PreTrainedModel) -> None:
    """Raises KvfoldError for a model with weights that accelerate has moved to the CPU or to disk.

    A file of its contexts could not name it.
    """
    for name, weight in model.named_parameters():
        _check_here(name, weight)


def _check_here(name: str, weight: Tensor) -> None:
    if weight.is_meta:
        raise KvfoldError(
            f"the weights of this model are offloaded ({name}), so kvfold cannot tell it from "
            "another one: load it onto GPUs that hold all of it, or --device cpu"
        )


def checksum(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Checksum over names, shapes and a sample of elements of all weights, in their order.

    Raises KvfoldError for weights that accelerate has moved to the CPU or to disk.
    """
    made = hashlib.blake2b(digest_size=16)
    for name, weight in weights:
        _check_here(name, weight)
        whole = full_weight(weight)
        flat = whole.flatten()
        sample = flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].contiguous().cpu()
        made.update(f"{name} {list(whole.shape)} ".encode())
        made.update(sample.view(torch.uint8).numpy().data)
    return made.hexdigest()


def rope_header(model: PreTrainedModel) -> tuple[RopeHeader, dict[str, Tensor]]:
    """RoPE parameters of the model, and its frequencies by name."""
    parameters, frequencies, scaling = rope_of(model)
    parameters = json.loads(json.dumps(parameters))
    return RopeHeader(parameters=parameters, scaling=scaling, moved=0), frequencies
