# SPDX-License-Identifier: Apache-2.0
"""PEFT's models and adapters: a cache filled under other adapters cannot be continued."""

from __future__ import annotations

from typing import Any

from torch import nn


def active_adapters(model: nn.Module) -> tuple[str, ...]:
    """Names of the adapters that are in effect, switched on or merged; none without PEFT.

    All of PEFT's layers in a model have the same ones, so the first tells. Merged ones are in
    effect whichever others are switched on.
    """
    if not hasattr(model, "peft_config"):
        return ()
    for module in model.modules():
        off = getattr(module, "disable_adapters", None)
        if isinstance(off, bool):  # of a model itself it is a method
            names: Any = getattr(module, "merged_adapters", ()) or module.active_adapters
            return () if off else tuple(names)
    return ()


def learns_prompts(model: Any) -> bool:
    """True if PEFT puts learned tokens or entries before each prompt of the model."""
    config = getattr(model, "active_peft_config", None)
    return bool(getattr(config, "is_prompt_learning", False))


def unwrapped(model: Any) -> nn.Module:
    """The model that PEFT wraps, or the model itself."""
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner
