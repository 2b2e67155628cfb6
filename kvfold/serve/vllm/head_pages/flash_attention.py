# SPDX-License-Identifier: Apache-2.0
"""vLLM's FlashAttention with pages of single heads."""

from __future__ import annotations

from typing import ClassVar

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from kvfold.serve.vllm.head_pages.attention import HeadPagesAttention, HeadPagesBuilder
from kvfold.serve.vllm.head_pages.contents import plain


class FlashHeadPagesBuilder(HeadPagesBuilder, FlashAttentionMetadataBuilder):
    """Builds each step's metadata."""

    vllms = FlashAttentionMetadataBuilder
    numbers_of_heads: ClassVar = ("num_heads_q", "num_heads_kv")


class FlashHeadPagesAttention(HeadPagesAttention, FlashAttentionImpl):
    """Attends."""

    vllms = FlashAttentionImpl
    read_blocks = staticmethod(plain)


class FlashHeadPagesBackend(FlashAttentionBackend):
    """vLLM's FlashAttention backend with these two."""

    @staticmethod
    def get_builder_cls() -> type[FlashHeadPagesBuilder]:
        """The class that builds each step's metadata."""
        return FlashHeadPagesBuilder

    @staticmethod
    def get_impl_cls() -> type[FlashHeadPagesAttention]:
        """The class that attends."""
        return FlashHeadPagesAttention
