# SPDX-License-Identifier: Apache-2.0
"""Tiny random models that read images or sound, and prompts with one of them in each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.models import VOCABULARY, prompts, sharpen

IMAGE, VISION_START, VISION_END = 190, 191, 192
TOKENS = 4  # of an image
FIRST = 30  # column of the first image token, right of all padding but the shortest row's
LENGTHS = (64, 53, 40)
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_FRAMES = {"max_source_positions": 4 * TOKENS}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def _llava() -> Any:
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_TEXT),
        vision_config=transformers.CLIPVisionConfig(**_VISION),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )


def _gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"] * 2
    return transformers.Gemma3Config(
        text_config={**_TEXT, "sliding_window": 16, "layer_types": kinds},
        vision_config=_VISION,
        mm_tokens_per_image=TOKENS,
        image_token_id=IMAGE,
        boi_token_id=VISION_START,
        eoi_token_id=VISION_END,
    )


def _qwen2_5_vl() -> Any:
    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48}
    return transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": _SECTIONS},
        vision_config={**vision, "num_heads": 2, "fullatt_block_indexes": [1]},
        image_token_id=IMAGE,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )


def _voxtral() -> Any:
    """Four frames of sound make a token, as wide as the encoder's inner layer."""
    audio = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2}
    return transformers.VoxtralConfig(
        text_config={**_TEXT, "model_type": "llama"},
        audio_config={**audio, "num_attention_heads": 2, "num_mel_bins": 8, **_FRAMES},
        audio_token_id=IMAGE,
    )


_CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llava": ("LlavaForConditionalGeneration", _llava),
    "gemma3": ("Gemma3ForConditionalGeneration", _gemma3),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl),
    "voxtral": ("VoxtralForConditionalGeneration", _voxtral),
}
FAMILIES = tuple(_CONFIGS)


def features_of(name: str) -> str:
    """The input that holds a family's images or sound."""
    return "input_features" if name == "voxtral" else "pixel_values"


def build(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model that reads images or sound."""
    torch.manual_seed(0)
    kind, config = _CONFIGS[name]
    model = getattr(transformers, kind)._from_config(config(), attn_implementation="sdpa")
    sharpen(model, 0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(dtype).eval()


def prompt(name: str, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """Padded prompts with an image or sound each, as `generate` takes them (float64)."""
    ids, mask = prompts(lengths)
    ids[:, FIRST - 1] = VISION_START
    ids[:, FIRST : FIRST + TOKENS] = IMAGE
    ids[:, FIRST + TOKENS] = VISION_END
    kinds = (ids == IMAGE).long()
    generator = torch.Generator().manual_seed(3)
    rows, given = len(lengths), {"input_ids": ids, "attention_mask": mask}
    if name == "qwen2_5_vl":
        size = 3 * 2 * 14 * 14
        pixels = torch.randn(rows * 16, size, generator=generator, dtype=torch.float64)
        grid = torch.tensor([[1, 4, 4]]).repeat(rows, 1)
        return given | {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}
    if name == "voxtral":
        frames = torch.randn(rows, 8, 8 * TOKENS, generator=generator, dtype=torch.float64)
        return given | {"input_features": frames}
    pixels = torch.randn(rows, 3, 28, 28, generator=generator, dtype=torch.float64)
    return (
        given | {"pixel_values": pixels} | ({"token_type_ids": kinds} if name == "gemma3" else {})
    )


def row(given: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """One row of a prompt, without its padding."""
    rows = len(given["input_ids"])
    real = given["attention_mask"][index].bool()
    alone = {}
    for key, value in given.items():
        own = value.view(rows, -1, *value.shape[1:])[index]
        alone[key] = value[index : index + 1, real] if value.shape == (rows, len(real)) else own
    return alone
