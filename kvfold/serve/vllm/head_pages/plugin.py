# SPDX-License-Identifier: Apache-2.0
"""Plugin that vLLM calls in each of its processes, before it chooses how to attend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.versions import check_installed

BACKEND = "kvfold.serve.vllm.head_pages.backend.HeadPagesBackend"


def register() -> None:
    """Puts pages of single heads into vLLM's CPU attention; elsewhere it does nothing.

    Requests without such pages are attended to by vLLM's own code.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    try:
        check_installed()
    except KvfoldError:
        return  # the connector says so, where it is asked for
    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)


def has_head_pages(config: Any) -> bool:
    """True if vLLM, by its `VllmConfig`, attends to pages of single heads."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    # Not registered off a CPU, or where VLLM_PLUGINS leaves kvfold out.
    registered = AttentionBackendEnum.CPU_ATTN.get_path() == BACKEND
    return registered and config.cache_config.cache_dtype == "auto"


def check_attention(layers: Mapping[str, Any]) -> None:
    """Raises KvfoldError for attention `layers` that pages of single heads do not go with."""
    for name, layer in layers.items():
        impl = layer.impl
        wrong = {
            "attention sinks": impl.sinks is not None,
            "ALiBi": impl.alibi_slopes is not None,
            "a window": impl.sliding_window != -1,
        }
        found = [what for what, there in wrong.items() if there]
        if found:
            raise KvfoldError(f"{name} has {' and '.join(found)}: use kvfold's own server")
