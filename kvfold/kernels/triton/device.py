# SPDX-License-Identifier: Apache-2.0
"""The GPU that a kernel is launched on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def on_its_device(function: Function) -> Function:
    """The function, run on its first argument's GPU: Triton takes the thread's current one."""

    @wraps(function)
    def run(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(tensor):
            return function(tensor, *args, **kwargs)

    return run  # type: ignore[return-value]
