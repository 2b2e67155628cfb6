# SPDX-License-Identifier: Apache-2.0
"""Full precision inside torch.autocast, which would round products of entries to 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
# True inside a torch.autocast of any device: asked first in each layer of each step, as the answer
# for one device takes ten times as long.
any_cast = torch._C._is_any_autocast_enabled


def is_cast(tensor: Tensor) -> bool:
    """True inside a torch.autocast of the tensor's device."""
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """`function` as outside of torch.autocast, wherever it is called."""

    @wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not any_cast():
            return function(*args, **kwargs)
        accelerator = torch.accelerator.current_accelerator()
        with ExitStack() as left:
            for device in {"cpu", "cpu" if accelerator is None else accelerator.type}:
                left.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return outside
