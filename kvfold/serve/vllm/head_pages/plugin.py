# SPDX-License-Identifier: Apache-2.0
"""Plugin that vLLM calls in each of its processes, before it chooses how to attend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.versions import check_installed

# Backends with pages of single heads, by the name of vLLM's own.
BACKENDS = {
    "CPU_ATTN": "kvfold.serve.vllm.head_pages.cpu.CPUHeadPagesBackend",
    "FLASH_ATTN": "kvfold.serve.vllm.head_pages.flash_attention.FlashHeadPagesBackend",
}
# Environment variable that a GPU needs: no GPU was there to test it on.
UNTESTED_GPU = "KVFOLD_UNTESTED_GPU"


def register() -> None:
    """Puts pages of single heads into vLLM's attention; elsewhere it does nothing.

    Requests without such pages are attended to by vLLM's own code.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    try:
        check_installed()
    except KvfoldError:
        return  # the connector says so, where it is asked for
    name = backend()
    if name is not None:
        register_backend(AttentionBackendEnum[name], BACKENDS[name])


def backend() -> str | None:
    """vLLM's backend that pages of single heads are there for on this machine; None: there is none.

    On a GPU it is FlashAttention, where `UNTESTED_GPU` is set.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "CPU_ATTN"
    return "FLASH_ATTN" if current_platform.is_cuda() and os.environ.get(UNTESTED_GPU) else None


def has_head_pages(config: Any) -> bool:
    """True if vLLM, by its `VllmConfig`, attends to pages of single heads."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    name = backend()
    if name is None or config.cache_config.cache_dtype != "auto":
        return False
    # vLLM chooses among those of a GPU, and its workers alone know which.
    chosen = config.attention_config.backend
    if name != "CPU_ATTN" and (chosen is None or chosen.name != name):
        return False
    # Not registered where VLLM_PLUGINS leaves kvfold out.
    return bool(AttentionBackendEnum[name].get_path() == BACKENDS[name])


def check_attention(layers: Mapping[str, Any]) -> None:
    """Raises KvfoldError for attention `layers` that pages of single heads do not go with."""
    for name, layer in layers.items():
        impl = layer.impl
        wrong = {
            "attention sinks": impl.sinks is not None,
            "ALiBi": impl.alibi_slopes is not None,
            "a window": impl.sliding_window not in (-1, (-1, -1)),
        }
        found = [what for what, there in wrong.items() if there]
        if found:
            raise KvfoldError(f"{name} has {' and '.join(found)}: use kvfold's own server")
