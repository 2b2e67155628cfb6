# SPDX-License-Identifier: Apache-2.0
"""Compiled forwards of transformers."""

from __future__ import annotations

import copy

from transformers import CompileConfig, PreTrainedModel

from kvfold.hf.models import caches_latents, shares_entries, text_config
from kvfold.hf.rotation import rope_types


def not_compiled_because(model: PreTrainedModel) -> str | None:
    """Reason why one graph cannot decode with this model; None if it can."""
    config = text_config(model)
    if not getattr(model, "_can_compile_fullgraph", False):
        return "is not compiled as one graph by transformers"
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        return "has quantized weights of a kind that transformers does not compile"
    if shares_entries(model):
        return "lets layers share keys and values"
    if caches_latents(model):
        return "caches latents, whose keys exist only inside a forward"
    if "dynamic" in rope_types(config):
        return "changes its rotary frequencies with the length"
    experts = any("Experts" in type(module).__name__ for module in model.modules())
    if experts and getattr(config, "_experts_implementation", None) == "eager":
        return "runs its experts one by one (experts_implementation='eager')"
    return None


def compile_config(given: CompileConfig | None) -> CompileConfig:
    """Configuration for compiled steps on every device; default: transformers', as one graph."""
    config = CompileConfig(fullgraph=True) if given is None else copy.copy(given)
    config._compile_all_devices = True  # type: ignore[assignment]
    return config
