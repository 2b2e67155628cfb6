# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connector for contexts; a stock vLLM loads it by its module path."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm import __version__ as vllm_version
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_gather
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.evictions.asked import AskedEviction, Shape
from kvfold.serve.vllm.evictions.metrics import EvictionMetrics, EvictionStats
from kvfold.serve.vllm.evictions.rank_heads import RankHeads
from kvfold.serve.vllm.evictions.schedule import (
    EvictionCounts,
    EvictionDone,
    EvictionSchedule,
    table_of,
)
from kvfold.serve.vllm.export import Paged
from kvfold.serve.vllm.head_pages.contents import check_contents
from kvfold.serve.vllm.head_pages.layout import Slabs
from kvfold.serve.vllm.head_pages.plugin import check_attention, has_head_pages
from kvfold.serve.vllm.meta_model import MetaModel
from kvfold.serve.vllm.placeholders import CompatibilityCheck, ServedFolder
from kvfold.serve.vllm.scheduler import EngineStep, SchedulerSide, check_engine, logger
from kvfold.serve.vllm.versions import check_version
from kvfold.serve.vllm.worker import WorkerSide


@dataclass
class KvfoldConnectorMetadata(KVConnectorMetadata):
    """The work of a step, sent from the scheduler to the workers."""

    step: EngineStep


@dataclass
class Copied(KVConnectorWorkerMetadata):
    """Evictions that are done, by the request; sent back to the scheduler."""

    done: dict[str, EvictionDone]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Copied:
        """Those of two workers, which evict alike."""
        assert isinstance(other, Copied)
        return Copied(self.done | other.done)


class KvfoldConnector(KVConnectorBase_V1):
    """KV connector that serves contexts, and evicts from prompts that have been read.

    `kv_connector_extra_config`: `{"contexts": path}` names the folder of context files, `{"evict":
    {"method": "snapkv", "budget": 0.25}}` what is evicted from requests that ask nothing. vLLM
    makes one in the scheduler and one in each worker. Raises KvfoldError for another version of
    vLLM, and for settings under which answers would be wrong.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_version(vllm_version)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_engine(vllm_config, len(kv_cache_config.kv_cache_groups))
        folder = self._kv_transfer_config.get_from_extra_config("contexts", None)
        evict = self._kv_transfer_config.get_from_extra_config("evict", None)
        model = vllm_config.model_config
        block = vllm_config.cache_config.block_size
        ranks = vllm_config.parallel_config.tensor_parallel_size
        paged = Paged(block, ranks) if has_head_pages(vllm_config) else None
        served_folder = None if folder is None else ServedFolder(folder, paged)
        meta_model = MetaModel(model.hf_config, model.model)
        heads = model.get_total_num_kv_heads()
        # The other one stays None: a process is either scheduler or worker.
        self.scheduler_side: Any = None
        self.worker_side: Any = None
        if role == KVConnectorRole.SCHEDULER:
            dtype = str(model.dtype).removeprefix("torch.")
            compatibility = None
            if served_folder is not None:
                compatibility = CompatibilityCheck(served_folder, meta_model, dtype)
            default = None if evict is None else AskedEviction.within(evict, paged)
            evicting = None
            if paged is not None:
                entry = 2 * model.get_head_size() * model.dtype.itemsize
                shape = Shape(meta_model.layers, heads, entry, block, ranks)
                evicting = EvictionSchedule(default, shape)
            self.scheduler_side = SchedulerSide(served_folder, compatibility, evicting, block)
        else:
            self._layers = {
                extract_layer_index(name): layer
                for name, layer in get_layers_from_vllm_config(vllm_config, Attention).items()
            }
            if paged is not None:
                check_attention(self._layers)
            of = get_tensor_model_parallel_rank()
            shared = RankHeads(of, ranks, heads, partial(tensor_model_parallel_all_gather, dim=0))
            self.worker_side = WorkerSide(served_folder, meta_model, model.dtype, block, shared)
            self._paged = paged
        self._failed: set[int] = set()
        self._refused: set[str] = set()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Pages of single heads, and layers one after another, where vLLM has these pages."""
        return "LBHNC" if has_head_pages(vllm_config) else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True: a graph of a whole step would not ask where pages of single heads lie."""
        return True

    # --- in the scheduler ------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Notes vLLM's own manager of blocks, from which evictions take theirs."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.scheduler_side.evicting is not None:
            self.scheduler_side.evicting.manager = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        """Notes what a new request asks."""
        self.scheduler_side.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens of the request's context beyond those cached; True if loaded asynchronously.

        None: it waits for blocks.
        """
        return self.scheduler_side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes the pages that vLLM has allocated for the request."""
        self.scheduler_side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvfoldConnectorMetadata:
        """The work of this step, for the workers."""
        scheduled = scheduler_output.num_scheduled_tokens
        preempted = scheduler_output.preempted_req_ids or set()
        step = self.scheduler_side.take(scheduled, preempted, self._block_of)
        return KvfoldConnectorMetadata(step)

    def update_connector_output(self, connector_output: Any) -> None:
        """Frees the blocks that entries were copied from in the step of this output."""
        copied = connector_output.kv_connector_worker_meta
        if copied is not None:
            self.scheduler_side.evicting.copied(copied.done)

    def _block_of(self, request: str, number: int) -> int:
        return int(table_of(self._kv_cache_manager, request)[number].block_id)

    def get_kv_connector_stats(self) -> EvictionStats | None:
        """What has been evicted since the last call; None in a worker."""
        evicting = None if self.scheduler_side is None else self.scheduler_side.evicting
        return None if evicting is None else EvictionStats.of(evicting.take_counts())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EvictionStats:
        """Counts that were sent from the scheduler."""
        return EvictionStats.of(EvictionCounts(**(data or {})))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], values: dict[int, Any]
    ) -> EvictionMetrics:
        """Counters at vLLM's /metrics."""
        return EvictionMetrics(vllm_config, metric_types, labelnames, values)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forgets the request, whose pages are free at once; its answer says what was evicted."""
        return False, self.scheduler_side.forget(request)

    # --- in a worker -----------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Tells the attention where requests have pages of single heads, before the forward."""
        super().bind_connector_metadata(connector_metadata)
        self._failed.update(self.worker_side.lay(connector_metadata.step, self._layers))

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Checks whose caches these are, and how vLLM's kernels lay keys out in pages of heads.

        Raises KvfoldError for those of a second vLLM in this process: vLLM gives it this connector.
        """
        own = {layer.kv_cache.data_ptr() for layer in self._layers.values()}
        if own != {cache.data_ptr() for cache in kv_caches.values()}:
            raise KvfoldError("vLLM has one connector in a process: end the other vLLM first")
        if self._paged is not None:
            Slabs.of(self._layers)
            check_contents(self._layers[0], self._paged.block)

    def build_connector_worker_meta(self) -> Copied | None:
        """What the evictions of this step have kept."""
        done, self.worker_side.done = self.worker_side.done, {}
        return Copied(done) if done else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Writes the contexts of this step into the pages, before the forward pass."""
        step = self._get_connector_metadata().step
        for name, blocks in step.refused.items():
            self._refused.add(name)
            self._failed.update(blocks)
        for load in step.loads:
            try:
                self.worker_side.fill(self._layers, load)
            # An exception here would end the engine with all its requests.
            except (KvfoldError, OSError, RuntimeError) as problem:
                logger.error("context %s could not be loaded: %s", load.context, problem)
                # vLLM then fails the requests that hold these blocks.
                self._failed.update(load.blocks[load.start // self.worker_side.block :])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """No finished sends; ids of refused requests, reported as finished loads."""
        refused, self._refused = self._refused, set()
        return None, refused or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages whose load failed; vLLM fails the requests that hold them."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: `start_load_kv` has loaded all layers."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: pages are not written back to contexts."""

    def wait_for_save(self) -> None:
        """Does nothing: pages are not written back to contexts."""
