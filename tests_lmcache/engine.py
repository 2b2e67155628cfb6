# SPDX-License-Identifier: Apache-2.0
"""What an engine on a GPU would do beside LMCache's server: register its layout, fill the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from lmcache.sdk.cache_kind import LMCacheSDKCacheKind
from lmcache.sdk.context import LMCacheSDKContext
from torch import Tensor

MODEL = "tiny"
LAYERS, HEADS, QUERY_HEADS, SIZE, CHUNK = 3, 2, 4, 8, 16
KV, QUERY = LMCacheSDKCacheKind.KV, LMCacheSDKCacheKind.QUERY
# Pages as vLLM registers them: format and shape by kind
LAYOUTS = {
    KV: ("NL_X_NB_TWO_NH_BS_HS", [1, 2, HEADS, CHUNK, SIZE]),
    QUERY: ("NL_X_NB_BS_HS", [1, CHUNK, QUERY_HEADS * SIZE]),
}


@dataclass(frozen=True)
class Server:
    """Addresses of a running LMCache server."""

    url: str
    http_url: str


@dataclass(frozen=True)
class Prompt:
    """A prompt's ids `[T]`, keys and values `[2, L, T, H·D]` and queries `[L, T, Hq·D]`."""

    ids: list[int]
    kv: Tensor
    queries: Tensor

    @classmethod
    def random(cls, tokens: int, seed: int) -> Prompt:
        """Random tensors, and ids that no other seed has."""
        draw = torch.Generator().manual_seed(seed)
        kv = torch.randn(2, LAYERS, tokens, HEADS * SIZE, generator=draw)
        queries = 3 * torch.randn(LAYERS, tokens, QUERY_HEADS * SIZE, generator=draw)
        return cls([10_000 * seed + i for i in range(tokens)], kv, queries)


@contextmanager
def contexts(server: Server) -> Iterator[tuple[LMCacheSDKContext, LMCacheSDKContext]]:
    """The SDK's contexts of KV and of queries, of an engine that has registered its layout."""
    made = tuple(_context(server, kind) for kind in (KV, QUERY))
    try:
        yield made
    finally:
        for context in made:
            context.close()


def fill(kv: LMCacheSDKContext, query: LMCacheSDKContext, prompt: Prompt, salt: str = "") -> None:
    """Stores a prompt's whole chunks, queries as vLLM's ring buffer does, without a first axis."""
    assert kv.store(prompt.kv, prompt.ids, salt)
    whole = len(prompt.ids) // CHUNK * CHUNK
    key = query._create_key(prompt.ids[:whole], 0, whole, f"{prompt.ids[0]}", salt, worker_id=0)
    transfer = query.transfer_ctx._context
    assert transfer.prepare_store(key, query.instance_id) is None  # by pickle
    chunks = [each.contiguous() for each in prompt.queries[:, :whole].split(CHUNK, 1)]
    assert transfer.commit_store(key, query.instance_id, chunks)


def _context(server: Server, kind: LMCacheSDKCacheKind) -> LMCacheSDKContext:
    context = LMCacheSDKContext(server.url, server.http_url, MODEL, kind=kind, timeout=20)
    form, shape = LAYOUTS[kind]
    group = {
        "dtype": "torch.float32",
        "tokens_per_block": CHUNK,
        "engine_kv_concrete_shape": f"NL x {shape}",
        "engine_kv_format": form,
    }
    layout = {"num_layers": LAYERS, "kernel_groups": [group]}
    registered = {"model_name": MODEL, "world_size": 1, "kv_cache_layout": layout}
    context._cache_context_meta_conf = {"1": registered}
    context.register_caches()
    return context
