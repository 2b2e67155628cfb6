# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention for page tables that begin with null pages."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionMetadataBuilder

NULL = 0


class PartBuilder(CPUAttentionMetadataBuilder):
    """Metadata without null pages: the kernel sees a shorter sequence; keys are rotated already."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Metadata of a step; vLLM passes the parameters by name."""
        common = common_attn_metadata
        rows = common.num_reqs
        pages, lengths = common.block_table_tensor[:rows], common.seq_lens[:rows]
        missing = (pages == NULL).int().cumprod(1).sum(1)
        used = (lengths + self.block_size - 1) // self.block_size
        # Rows without any page are padding.
        missing = missing.masked_fill(missing >= used, 0)
        if bool(missing.any()):
            shifted = torch.arange(pages.shape[1]) + missing[:, None]
            table, left = common.block_table_tensor.clone(), common.seq_lens.clone()
            table[:rows] = pages.gather(1, shifted.clamp(max=pages.shape[1] - 1))
            left[:rows] -= (missing * self.block_size).to(left.dtype)
            common = dataclasses.replace(
                common, block_table_tensor=table, seq_lens=left, max_seq_len=int(left.max())
            )
        return super().build(common_prefix_len, common, fast_build)


class PartBackend(CPUAttentionBackend):
    """vLLM's CPU backend with `PartBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[PartBuilder]:
        """The class that builds each step's metadata."""
        return PartBuilder
