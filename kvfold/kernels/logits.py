# SPDX-License-Identifier: Apache-2.0
"""`LogitOptions`: how logits are made of products of queries and keys, the same for all kernels."""

from __future__ import annotations

from typing import Required, TypedDict

from torch import Tensor


class LogitOptions(TypedDict, total=False):
    """Keyword arguments of attention kernels; those that are left out are None."""

    scale: Required[float]  # factor of the products
    softcap: float | None  # c: logits x become c · tanh(x / c) (Gemma 2)
    sink_logits: Tensor | None  # [Hq], in the softmax's denominator only (GPT-OSS)
