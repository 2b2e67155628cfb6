# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every architecture, from the shrunk defaults of their configurations."""

from __future__ import annotations

import copy
import math
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from kvfold.evidence.grouped import grouped

MAPPINGS = ("CAUSAL_LM", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
SHRINKING = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
SIZES = {name: int(size) for size, names in SHRINKING["sizes"].items() for name in names}

VOCABULARY, HIDDEN, HEAD, LAYERS = 199, 64, 16, 4
TEXT_IDS = (3, 100)  # ids of text; special tokens of images and the like follow
WEIGHTS = 40_000_000  # a model of more is not tiny
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size")
FIXED = ("model_type", "transformers_version", "architectures", "dtype", "default")
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "decoder_layers", "depth")
KINDS = ("layer_types", "layers_block_type", "block_types")


def architectures() -> dict[str, str]:
    """Model type by class, of every class of transformers' causal and composite mappings."""
    found: dict[str, str] = {}
    for mapping in MAPPINGS:
        for kind, name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            found.setdefault(name, kind)
    return found


def tiny_config(name: str) -> PreTrainedConfig:
    """The shrunk default configuration of a class, with its overrides."""
    own = SHRINKING["classes"].get(name, {})
    config = _shrunk(getattr(transformers, name).config_class(**own.get("default", {})), own)
    if name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        config.is_decoder = True  # of models that are encoders by default
    return config


def tiny_model(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model of a class, whose attention is far from uniform."""
    config = tiny_config(name)
    kind = getattr(transformers, name)
    with torch.device("meta"):
        weights = kind._from_config(copy.deepcopy(config)).num_parameters()
    if weights > WEIGHTS:
        raise ValueError(f"{weights / 1e6:.0f} M weights: the configuration is not tiny")
    torch.manual_seed(0)
    made = partial(kind._from_config, config, experts_implementation="eager", dtype=dtype)
    model: PreTrainedModel
    try:
        model = made(attn_implementation="sdpa" if kind._supports_sdpa else "eager").eval()
    except ValueError:  # a tower of a model that has SDPA may have none
        model = made(attn_implementation="eager").eval()
    _sharpen(model)
    return model


@torch.no_grad()
def _sharpen(model: PreTrainedModel) -> None:
    """Replaces the usual tiny weights: with those all attention is uniform, whatever is evicted."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        if weight.ndim >= 2:
            weight.copy_(noise * (0.5 if "embed" in name else 1.5 / weight.shape[-1] ** 0.5))
        elif "sink" in name:
            weight.copy_(noise)


def _shrunk(config: PreTrainedConfig, own: dict[str, Any]) -> PreTrainedConfig:
    """The configuration and those it holds, with few small layers; `own` are overrides."""
    values = config.to_dict()
    layers = next((values[k] for k in LAYER_COUNTS if isinstance(values.get(k), int)), 0)
    kinds: list[Any] = next((values[k] for k in KINDS if isinstance(values.get(k), list)), [])
    chosen = _choose(kinds if len(kinds) == layers else list(range(layers)), own.get("layers"))
    held = {k: v for k, v in vars(config).items() if isinstance(v, PreTrainedConfig)}
    for key, value in values.items():
        values[key] = _smaller(str(key), value, layers, chosen)
    _consistent(values)
    values |= {k: v for k, v in own.items() if k != "layers"}
    values |= {k: _shrunk(inner, own.get(k, {})) for k, inner in held.items()}
    for key in FIXED:
        values.pop(key, None)
    made: type[Any] = type(config)
    shrunk: PreTrainedConfig = made(**{k: None if v == "none" else v for k, v in values.items()})
    return shrunk


def _choose(kinds: Sequence[Any], layers: int | None) -> list[int]:
    """Indices of layers that stay: of each kind as many, in their order."""
    named = (kind if isinstance(kind, str) else "" for kind in kinds)
    of_kind = grouped((kind, index) for index, kind in enumerate(named))
    turns = max(map(len, of_kind.values()), default=0)
    order = [of[turn] for turn in range(turns) for of in of_kind.values() if turn < len(of)]
    return sorted(order[: max(layers or LAYERS, len(of_kind))])


def _smaller(key: str, value: Any, layers: int, chosen: list[int]) -> Any:
    """An entry of a configuration of `layers` layers, of which the `chosen` stay."""
    if key in VOCABULARIES:
        return VOCABULARY
    if key in LAYER_COUNTS and value == layers:
        return len(chosen)
    if isinstance(value, int) and not isinstance(value, bool):
        return min(value, SIZES.get(key, value))
    if key == "per_layer_config" and value:
        of_layer = {chosen.index(int(k)): v for k, v in value.items() if int(k) in chosen}
        return {
            i: {k: _smaller(k, v, layers, chosen) for k, v in own.items()}
            for i, own in of_layer.items()
        }
    if isinstance(value, list) and value and len(value) == layers:
        return [_smaller(key, value[i], layers, chosen) for i in chosen]
    if isinstance(value, list) and value and key.endswith(("layers", "indexes", "idxs", "ids")):
        numbers = all(isinstance(v, int) and 0 <= v < layers for v in value)
        return sorted({v * len(chosen) // layers for v in value}) if numbers else value
    return value


def _consistent(values: dict[str, Any]) -> None:
    """Numbers of a shrunk configuration that belong together."""
    for key, size in SHRINKING["missing"].items():
        if key in values and values[key] is None:
            values[key] = size
    if values.get("kv_lora_rank") and values.get("num_key_value_heads"):
        values["num_key_value_heads"] = values["num_attention_heads"]
        if values.get("head_dim"):
            values["head_dim"] = values["qk_rope_head_dim"]
    for heads, size in (("mamba_n_heads", "mamba_d_head"), ("num_heads", "head_dim")):
        expand = values.get("mamba_expand") or values.get("expand")
        if expand and values.get(heads) and values.get(size):
            values[heads] = expand * HIDDEN // values[size]
    for key, value in list(values.items()):
        if str(key).endswith(("_token_id", "_token_index")) and isinstance(value, int):
            values[key] = value if value < VOCABULARY else TEXT_IDS[1] + sum(map(ord, key)) % 90
    for holder in (values, values.get("rope_parameters"), values.get("rope_scaling")):
        if isinstance(holder, dict) and holder.get("mrope_section"):
            part = values.get("partial_rotary_factor") or holder.get("partial_rotary_factor") or 1
            holder["mrope_section"] = _shared(int(HEAD * part) // 2, len(holder["mrope_section"]))


def _shared(total: int, parts: int) -> list[int]:
    """`total` in equal parts, the last ones larger."""
    return [
        math.floor(total * (i + 1) / parts) - math.floor(total * i / parts) for i in range(parts)
    ]
