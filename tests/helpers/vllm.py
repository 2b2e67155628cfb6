# SPDX-License-Identifier: Apache-2.0
"""What vLLM hands to a connector, made by hand."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvfold.contexts.files.format import opened, read_header
from kvfold.serve.vllm.evictions.rank_heads import RankHeads
from kvfold.serve.vllm.export import EntryCounts, pages
from kvfold.serve.vllm.meta_model import MetaModel
from kvfold.serve.vllm.placeholders import ServedContext, ServedFolder
from kvfold.serve.vllm.request import CONTEXT, ContextPrompt
from kvfold.serve.vllm.scheduler import ContextLoad
from kvfold.serve.vllm.worker import WorkerSide

BLOCK = 16
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def filled(path: Path, meta_model: MetaModel, heads: slice = slice(None)) -> DynamicCache:
    """transformers' own cache with what vLLM's pages would hold."""
    cache = DynamicCache()
    with opened(path) as file:
        for page in pages(file, meta_model, heads, EntryCounts.of(file.header, None)):
            keys, values = (rows.transpose(0, 1)[None] for rows in (page.keys, page.values))
            cache.update(keys.to(values.dtype), values, page.layer)
    return cache


def request_for(served: ServedContext | None, **changes: Any) -> Any:
    """What vLLM's scheduler knows of a request."""
    asked = None if served is None else ContextPrompt(served, [5, 6, 7])
    fields = {
        "request_id": "r",
        "prompt_token_ids": [5, 6, 7] if asked is None else asked.token_ids,
        "cache_salt": None if served is None else served.salt,
        "kv_transfer_params": None if served is None else {CONTEXT: served.id},
        "sampling_params": SimpleNamespace(prompt_logprobs=None),
        "skip_reading_prefix_cache": False,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
    } | changes
    return SimpleNamespace(num_tokens=len(fields["prompt_token_ids"]), **fields)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no salt": ({"cache_salt": None}, "needs cache_salt 'kvfold:"),
    "an empty salt": ({"cache_salt": ""}, "needs cache_salt 'kvfold:"),  # vLLM takes it for none
    "another's salt": ({"cache_salt": "kvfold:0"}, "needs cache_salt 'kvfold:"),
    "no context": ({"kv_transfer_params": None}, "kv_transfer_params name none"),
    "unknown context": ({"kv_transfer_params": {CONTEXT: "none"}}, "there is no context 'none'"),
    "a path": ({"kv_transfer_params": {CONTEXT: "../even"}}, "there is no context '../even'"),
    "another context": ({"kv_transfer_params": {CONTEXT: "other"}}, "needs cache_salt"),
    "few placeholders": ({"prompt_token_ids": [5]}, "does not begin with the 40 placeholders"),
    "other placeholders": ({"prompt_token_ids": [4] * 50}, "does not begin with the 40"),
    "prompt_logprobs": (
        {"sampling_params": SimpleNamespace(prompt_logprobs=1)},
        "does not go with prompt_logprobs",
    ),
    "no reading": ({"skip_reading_prefix_cache": True}, "does not go with skip_reading"),
    "pooling": ({"sampling_params": None}, "does not go with pooling"),
    "an adapter": ({"lora_request": object()}, "does not go with a LoRA adapter"),
    "an image": ({"mm_features": [object()]}, "does not go with images"),
    "embeddings": ({"prompt_embeds": object()}, "does not go with prompt_embeds"),
}


def engine(**changes: Any) -> Any:
    """vLLM's settings."""
    fields = {
        "kv_load_failure_policy": "fail",
        "speculative_config": None,
        "quantization": None,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    } | changes
    flat = SimpleNamespace(**fields)
    parts = ("kv_transfer_config", "parallel_config", "model_config")
    return SimpleNamespace(**dict.fromkeys(parts, flat), **fields)


def header_keeping(served_folder: ServedFolder, seen: int, *kept: list[int]) -> Any:
    """The header of a file of `seen` tokens whose layers have heads that keep so many."""
    header = read_header(served_folder.path("even"))
    part = header.layers[0]
    layers = [part.model_copy(update={"kept": counts}) for counts in kept]
    return header.model_copy(update={"layers": layers, "seen": seen})


class Layer:
    """An attention layer of vLLM on a CPU: a cache `[blocks, H, BLOCK, 2·D]`.

    Of a block's rows of a head, D numbers each, the first half are keys and the others values.
    """

    def __init__(self, heads: int, kv_cache: Tensor) -> None:
        size = kv_cache.shape[-1] // 2
        self.impl = SimpleNamespace(
            num_kv_heads=heads, head_size=size, do_kv_cache_update=self._update
        )
        self.kv_cache = kv_cache

    def _update(self, layer: Any, keys: Tensor, values: Tensor, pages: Any, slots: Any) -> None:
        assert keys.is_contiguous() and values.is_contiguous() and layer is self
        for part, rows in zip(_halves(pages), (keys, values), strict=True):
            part[slots // BLOCK, :, slots % BLOCK] = rows

    @property
    def written(self) -> Tensor:
        """True for each slot of a head, `[blocks, H, BLOCK]`, that was filled."""
        return ~_halves(self.kv_cache)[0].isnan().any(-1)

    def read(self, slots: Sequence[int]) -> list[Tensor]:
        """Keys and values `[H, n, D]` in vLLM's slots."""
        at = torch.tensor(slots)
        return [part[at // BLOCK, :, at % BLOCK].transpose(0, 1) for part in _halves(self.kv_cache)]


def layers_of(heads: int, layers: int = 4, size: int = 8, blocks: int = 16) -> dict[int, Layer]:
    """Layers whose caches lie one after another in one tensor, as vLLM's."""
    whole = torch.full((layers, blocks, heads, BLOCK, 2 * size), torch.nan)
    return {number: Layer(heads, slab) for number, slab in enumerate(whole)}


def read_pages(layers: Mapping[int, Layer], numbers: Sequence[int]) -> list[Tensor]:
    """Keys and values `[n, D]` of pages of a head: number `(layer·blocks + block)·H + h`."""
    whole = torch.stack([layers[number].kv_cache for number in range(len(layers))])
    return [part.flatten(0, 1)[numbers].flatten(0, 1) for part in _halves(whole.flatten(0, 1))]


def _halves(cache: Tensor) -> tuple[Tensor, ...]:
    """Keys and values `[blocks, H, BLOCK, D]`, as vLLM's own attention takes them apart."""
    return cache.view(*cache.shape[:2], 2 * BLOCK, -1).chunk(2, dim=2)


def load_of(served: ServedContext, blocks: list[int], start: int = 0) -> ContextLoad:
    return ContextLoad(served.id, served.salt, start, served.kept, blocks, served.pages)


def slots_of(load: ContextLoad) -> list[int]:
    """vLLM's slots of the positions that are loaded."""
    places = range(load.start, load.count)
    return [load.blocks[i // BLOCK] * BLOCK + i % BLOCK for i in places]


def vllm_on(monkeypatch: pytest.MonkeyPatch, *, cpu: bool) -> None:
    """A vLLM that can be imported, as far as its platform."""
    platform = SimpleNamespace(is_cpu=lambda: cpu, is_cuda=lambda: not cpu)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))


def worker_side_of(
    served_folder: ServedFolder, meta_model: MetaModel, rank: int = 0, size: int = 1
) -> WorkerSide:
    ranks = RankHeads(rank, size, 2, lambda own: own)
    return WorkerSide(served_folder, meta_model, torch.float32, BLOCK, ranks)
