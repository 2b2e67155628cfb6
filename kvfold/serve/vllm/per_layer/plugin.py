# SPDX-License-Identifier: Apache-2.0
"""Plugin that vLLM calls in each of its processes; without the variable it does nothing."""

from __future__ import annotations

import functools
import os
from typing import Any

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.per_layer.sizes import VARIABLE, parse_parts

CONNECTOR = "PartsConnector"
BACKEND = "kvfold.serve.vllm.per_layer.backend.PartBackend"


def register() -> None:
    """Gives every attention layer the part that the variable names.

    Raises KvfoldError off a CPU.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        return
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from kvfold.serve.vllm.per_layer.pages import PartManager, PartSpec

    parts = parse_parts(text)
    if not current_platform.is_cpu():
        raise KvfoldError(f"{VARIABLE} changes the CPU's attention only: leave it out on a GPU")
    # vLLM registers its own specs only if none is registered yet.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(PartSpec, PartManager, uniform_type_base_spec=PartSpec)
    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    whole = Attention.get_kv_cache_spec
    if hasattr(whole, "__wrapped__"):
        return

    @functools.wraps(whole)
    def of_part(self: Any, config: Any) -> Any:
        transfer = config.kv_transfer_config
        if transfer is None or transfer.kv_connector != CONNECTOR:
            # Without the connector, ordinary prefixes would lose pages, too.
            raise KvfoldError(f"{VARIABLE} goes with kv_connector={CONNECTOR!r}: unset it")
        layer = extract_layer_index(self.layer_name)
        if layer >= len(parts):
            raise KvfoldError(f"{VARIABLE} names {len(parts)} layers, and there is layer {layer}")
        return PartSpec.like(whole(self, config), parts[layer])

    # vLLM takes a layer's spec from this method only; there is no hook for it.
    Attention.get_kv_cache_spec = of_part
