# SPDX-License-Identifier: Apache-2.0
"""Weights that bitsandbytes or torchao have quantized, as tensors that can be sampled."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


def samplable(weight: Tensor) -> Tensor:
    """A plain tensor that stays the same for a quantized weight; other weights as they are.

    bitsandbytes packs 4-bit codes anew in the first forward on a CPU: these are put back in order.
    torchao's weights are no plain tensors: theirs are the numbers that they stand for.
    """
    plain, state = weight.detach(), getattr(weight, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        from bitsandbytes import functional

        inverse: Any = functional._convert_weight_packed_for_cpu_inverse
        codes: Tensor = inverse(weight.data, copy.copy(state))[0]  # it changes the state
        return codes
    kind = type(plain)
    if kind in (Tensor, nn.Parameter) or not kind.__module__.startswith("torchao."):
        return plain
    return plain.dequantize()
