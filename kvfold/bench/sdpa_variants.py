# SPDX-License-Identifier: Apache-2.0
"""Ways to call SDPA under grouped-query attention, and the choice of the fastest one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from kvfold.hf.models import text_config
from kvfold.measure.clock import seconds

TRIED = 2048  # tokens of the timed prefill, at most
TRIES = 5  # timed calls per kernel
NO_KERNEL = "No available kernel"  # how torch's error begins

Layout = Literal["packed", "repeated", "grouped"]
WORDS = {
    "packed": "query heads packed as rows",
    "repeated": "keys repeated",
    "grouped": "enable_gqa",
}


@dataclass(frozen=True)
class SdpaVariant:
    """One way to call SDPA with G query heads per KV head.

    `flash` forces the flash kernel; otherwise SDPA picks one.
    """

    layout: Layout
    flash: bool = False

    def __str__(self) -> str:
        return f"sdpa{' flash' if self.flash else ''}, {WORDS[self.layout]}"

    def chosen(self) -> AbstractContextManager[Any]:
        """Context manager inside which SDPA uses this kernel."""
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.flash else nullcontext()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """Attention output `[B, Hq, S, D]` of query `[B, Hq, S, D]` over key, value `[B, H, T, D]`.

        Without a mask, attention is causal if S > 1, and full if S = 1.
        """
        groups, new = query.shape[1] // key.shape[1], query.shape[2]
        causal = mask is None and new > 1
        call = partial(F.scaled_dot_product_attention, scale=scale)
        if self.layout == "packed" and new == 1 and mask is None:
            grouped = query.unflatten(1, (-1, groups)).squeeze(3)
            return call(grouped, key, value).reshape(query.shape)
        if self.layout == "grouped" and mask is None:
            return call(query, key, value, is_causal=causal, enable_gqa=groups > 1)
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return call(query, key, value, attn_mask=mask, is_causal=causal)


@dataclass(frozen=True)
class SdpaChoice:
    """Kernels of the full cache, one for prefill and one for decode."""

    prefill: SdpaVariant = SdpaVariant("repeated")
    decode: SdpaVariant = SdpaVariant("packed")

    def __str__(self) -> str:
        return f"prefill {self.prefill}; decode {self.decode}"


@torch.no_grad()
def fastest(model: PreTrainedModel, batch: int, length: int) -> SdpaChoice:
    """The fastest kernels on this machine for a prompt of `length`; prefill is timed on ≤ 2048."""
    config = text_config(model)
    heads = config.num_attention_heads
    stored = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    some = partial(torch.randn, dtype=model.dtype, device=model.device)
    short = max(2, min(length, TRIED))
    query = some(batch, heads, short, size)
    key, value = some(2, batch, stored, length, size)
    flashes = (False, True) if model.device.type == "cuda" else (False,)

    def best(query: Tensor, tokens: int, layouts: tuple[Layout, ...]) -> SdpaVariant:
        kernels = [SdpaVariant(layout, flash) for flash in flashes for layout in layouts]
        k, v = key[:, :, :tokens], value[:, :, :tokens]
        return min(kernels, key=partial(_time, query=query, key=k, value=v))

    return SdpaChoice(
        best(query, short, ("repeated", "grouped")),
        best(query[:, :, -1:].contiguous(), length, ("packed", "grouped")),
    )


def _time(kernel: SdpaVariant, query: Tensor, key: Tensor, value: Tensor) -> float:
    """Seconds of the fastest of `TRIES` calls; infinite without such a kernel, or memory for it."""
    scale = query.shape[-1] ** -0.5
    try:
        with kernel.chosen():
            work = partial(kernel.attend, query, key, value, None, scale)
            work()
            return min(seconds(query.device, work) for _ in range(TRIES))
    except torch.OutOfMemoryError:
        return float("inf")
    except RuntimeError as problem:
        if NO_KERNEL not in str(problem):
            raise
        return float("inf")
