# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV connector for contexts; a stock vLLM loads it by its module path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.model_executor.models.utils import extract_layer_index

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.meta_model import MetaModel
from kvfold.serve.vllm.placeholders import CompatibilityCheck, ServedFolder
from kvfold.serve.vllm.scheduler import ContextLoad, EngineStep, SchedulerSide, check_engine, logger
from kvfold.serve.vllm.versions import check_version
from kvfold.serve.vllm.worker import WorkerSide


@dataclass
class KvfoldConnectorMetadata(KVConnectorMetadata):
    """The work of a step, sent from the scheduler to the workers."""

    step: EngineStep


class KvfoldConnector(KVConnectorBase_V1):
    """KV connector that fills the pages of a request with the entries of its context.

    `kv_connector_extra_config` names the folder of the context files: `{"contexts": path}`. vLLM
    makes one in the scheduler and one in each worker. Raises KvfoldError without a folder, for
    another version of vLLM, and for settings under which answers would be wrong.
    """

    SchedulerSide = SchedulerSide

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_version(vllm_version)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_engine(vllm_config, self.kinds(kv_cache_config))
        folder = self._kv_transfer_config.get_from_extra_config("contexts", None)
        if folder is None:
            raise KvfoldError('name the folder of contexts: kv_connector_extra_config["contexts"]')
        model = vllm_config.model_config
        block = vllm_config.cache_config.block_size
        served_folder = self.served_folder(folder, block)
        meta_model = MetaModel(model.hf_config, model.model)
        # The other one stays None: a process is either scheduler or worker.
        self.scheduler_side: Any = None
        self.worker_side: Any = None
        if role == KVConnectorRole.SCHEDULER:
            dtype = str(model.dtype).removeprefix("torch.")
            self.scheduler_side = self.SchedulerSide(
                served_folder, CompatibilityCheck(served_folder, meta_model, dtype), block
            )
        else:
            rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
            self.worker_side = WorkerSide(served_folder, meta_model, model.dtype, block, rank, size)
        self._failed: set[int] = set()
        self._refused: set[str] = set()

    def kinds(self, kv_cache_config: Any) -> int:
        """Number of cache groups: kinds of layers with page tables of their own."""
        return len(kv_cache_config.kv_cache_groups)

    def served_folder(self, folder: str, block: int) -> ServedFolder:
        """Context files of `folder`, for pages of `block` entries."""
        return ServedFolder(folder)

    # --- in the scheduler ------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens of the request's context beyond those cached; True if loaded asynchronously."""
        return self.scheduler_side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes the pages that vLLM has allocated for the request."""
        self.scheduler_side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvfoldConnectorMetadata:
        """The work of this step, for the workers."""
        return KvfoldConnectorMetadata(self.scheduler_side.take())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forgets the request; its pages can be freed at once."""
        self.scheduler_side.forget(request)
        return False, None

    # --- in a worker -----------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Writes the contexts of this step into the pages, before the forward pass."""
        step = self._get_connector_metadata().step
        for name, blocks in step.refused.items():
            self._refused.add(name)
            self._failed.update(blocks)
        if not step.loads:
            return
        layers = {
            extract_layer_index(name): layer
            for name, layer in forward_context.no_compile_layers.items()
            if getattr(layer, "kv_cache", None) is not None
        }
        for load in step.loads:
            try:
                self.worker_side.fill(layers, load)
            # An exception here would end the engine with all its requests.
            except (KvfoldError, OSError, RuntimeError) as problem:
                logger.error("context %s could not be loaded: %s", load.context, problem)
                self.load_failed(load, problem)

    def load_failed(self, load: ContextLoad, problem: Exception) -> None:
        """Reports the pages of a load as failed; vLLM then fails the requests that hold them."""
        self._failed.update(load.blocks)

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
