# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU attention with pages of single heads."""

from __future__ import annotations

from typing import ClassVar

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from kvfold.serve.vllm.head_pages.attention import HeadPagesAttention, HeadPagesBuilder
from kvfold.serve.vllm.head_pages.contents import with_keys_transposed


class CPUHeadPagesBuilder(HeadPagesBuilder, CPUAttentionMetadataBuilder):
    """Builds each step's metadata."""

    vllms = CPUAttentionMetadataBuilder
    numbers_of_heads: ClassVar = ("num_heads", "num_kv_heads")


class CPUHeadPagesAttention(HeadPagesAttention, CPUAttentionBackendImpl):
    """Attends."""

    vllms = CPUAttentionBackendImpl
    read_blocks = staticmethod(with_keys_transposed)


class CPUHeadPagesBackend(CPUAttentionBackend):
    """vLLM's CPU backend with these two."""

    @staticmethod
    def get_builder_cls() -> type[CPUHeadPagesBuilder]:
        """The class that builds each step's metadata."""
        return CPUHeadPagesBuilder

    @staticmethod
    def get_impl_cls() -> type[CPUHeadPagesAttention]:
        """The class that attends."""
        return CPUHeadPagesAttention
