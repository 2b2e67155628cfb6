# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of many families, with attention that is far from uniform."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 199
EAGER = ("gemma2", "gpt_oss")  # softcap and sinks: their sdpa path does not exist
WITHOUT_INTERFACE = ("falcon", "gptj", "bloom", "mpt")  # attention written out in the model file
# Keys, values or masks are changed between cache and attention, or the cache is one of their own.
WITHOUT_OUR_CACHE = ("diffllama", "doge", "jetmoe", "minimax")
# Their own positions begin elsewhere, or anew in each forward.
COUNTING_OTHERWISE = ("bamba", "roberta")
# Windows that no text of the trained length fills, as in Phi-3-mini-128k.
NEVER_SLIDING = ("phi3_wide", "mistral_wide")
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
    "n_shared_experts": 1,
}
_SHARED_KEYS = {
    "head_dim": 8,
    "sliding_window": 16,
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0] * 8,
}
_LINEAR = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_GPT = {"n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 4096}
_GPT_NAMES = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
# Configuration class, and what differs from the common sizes.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 8, **_EXPERTS}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "phi3_wide": ("Phi3Config", {"partial_rotary_factor": 0.5, "sliding_window": 8192}),
    "mistral_wide": ("MistralConfig", {"sliding_window": 4096}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 8, "sliding_window": 16, "layer_types": _SHARED_KEYS["layer_types"][:4]},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 8, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmo2": ("Olmo2Config", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": 16}),
    "granite": ("GraniteConfig", {}),
    "glm4": ("Glm4Config", {"head_dim": 8}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": ...}),
    "smollm3": ("SmolLM3Config", {}),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "gemma3n": ("Gemma3nTextConfig", _SHARED_KEYS),
    "gpt2": ("GPT2Config", _GPT),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "num_local_experts": 2,
            "attention_chunk_size": 32,
            "intermediate_size_mlp": 96,
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _LINEAR),
    "jamba": (
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "ministral": (
        "MinistralConfig",
        {"head_dim": 8, "sliding_window": 16, "layer_types": _SHARED_KEYS["layer_types"][:4]},
    ),
    "bamba": (
        "BambaConfig",
        {
            "attn_layer_indices": [1, 3],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
    ),
    "roberta": ("RobertaConfig", {"is_decoder": True}),
    "diffllama": ("DiffLlamaConfig", {}),
    "doge": ("DogeConfig", {}),
    "jetmoe": (
        "JetMoeConfig",
        {"kv_channels": 8, "num_key_value_heads": 4, "num_local_experts": 4},
    ),
    "minimax": ("MiniMaxConfig", {"head_dim": 8, "num_local_experts": 4}),
    "falcon": ("FalconConfig", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "gptj": ("GPTJConfig", {**_GPT, "rotary_dim": 8}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 8}),
    "mpt": ("MptConfig", {"d_model": 64, "n_heads": 8, "n_layers": 2}),
}


def config(name: str, **changes: Any) -> Any:
    """The tiny configuration of a family, with `changes`; `...` leaves an entry out."""
    kind, own = _CONFIGS[name]
    own = own | changes
    renamed = any(size in own for size in ("n_embd", "n_layer", "n_layers"))
    common = {k: v for k, v in _COMMON.items() if not renamed or k in _GPT_NAMES}
    if name == "bloom":
        common["hidden_size"] = 64
    values = {k: v for k, v in (common | own).items() if v is not ...}
    return getattr(transformers, kind)(**values)


def build(
    name: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A random model of the family `name`; `changes` go into its configuration."""
    torch.manual_seed(seed)
    attention = "eager" if name in EAGER else "sdpa"
    if name in WITHOUT_INTERFACE:
        attention = "eager"
    model = AutoModelForCausalLM.from_config(
        config(name, **changes), attn_implementation=attention, experts_implementation="eager"
    )
    sharpen(model, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


@torch.no_grad()
def sharpen(model: PreTrainedModel, seed: int) -> None:
    """Replaces the usual tiny weights: with those all attention is uniform, whatever is evicted."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim >= 2:
            weight.copy_(noise * (0.5 if "embed" in name else 1.5 / weight.shape[-1] ** 0.5))
        elif "sink" in name:
            weight.copy_(noise)


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    name: partial(build, name)
    for name in _CONFIGS
    if name not in WITHOUT_INTERFACE + WITHOUT_OUR_CACHE + COUNTING_OTHERWISE + NEVER_SLIDING
}


def prompts(lengths: tuple[int, ...] = (64, 53, 24), seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random token ids of these lengths, padded on the left, and their mask: `[B, N]` each."""
    longest = max(lengths)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (len(lengths), longest), generator=generator)
    missing = longest - torch.tensor(lengths)
    mask = (torch.arange(longest) >= missing[:, None]).long()
    return ids * mask, mask


def continuation(rows: int, length: int, seed: int = 2) -> Tensor:
    """Random token ids `[rows, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def broken(module):
    """Until the handle that is returned is removed, every call of `module` fails."""

    def fail(*args):
        raise RuntimeError("broken")

    return module.register_forward_pre_hook(fail)


def with_key_biases(model: Any, channels: list[int], by: float) -> Any:
    """The same model, changed: `by` is added to these channels of each head's key before RoPE."""
    for layer in model.get_decoder().layers:
        linear = layer.self_attn.k_proj
        bias = torch.zeros_like(linear.weight[:, 0]).view(-1, layer.self_attn.head_dim)
        bias[:, channels] = by
        linear.bias = torch.nn.Parameter(bias.flatten())
    return model
