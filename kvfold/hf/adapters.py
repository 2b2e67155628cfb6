# SPDX-License-Identifier: Apache-2.0
"""Active PEFT adapters of a model: a cache filled under other adapters cannot be continued."""

from __future__ import annotations

from torch import nn


def active_adapters(model: nn.Module) -> tuple[str, ...]:
    """Names of the adapters that are switched on; none without PEFT.

    All of PEFT's layers in a model have the same ones, so the first tells.
    """
    if not hasattr(model, "peft_config"):
        return ()
    for module in model.modules():
        off = getattr(module, "disable_adapters", None)
        if isinstance(off, bool):  # of a model itself it is a method
            names: list[str] = module.active_adapters  # type: ignore[assignment]
            return () if off else tuple(names)
    return ()
