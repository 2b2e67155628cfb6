# SPDX-License-Identifier: Apache-2.0
"""Connector for per-layer parts: `kv_connector="PartsConnector"`, with the variable set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.model_executor.models.utils import extract_layer_index

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.connector import KvfoldConnector
from kvfold.serve.vllm.per_layer.pages import PartSpec
from kvfold.serve.vllm.per_layer.scheduler import CacheGroup, PartsSchedulerSide
from kvfold.serve.vllm.per_layer.sizes import VARIABLE, Parts
from kvfold.serve.vllm.placeholders import ServedFolder
from kvfold.serve.vllm.scheduler import ContextLoad


class PartsConnector(KvfoldConnector, SupportsHMA):
    """KV connector that fills the pages of each cache group; a failed load ends the engine.

    Raises KvfoldError with the prefix cache on, and if layers hold no parts.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        groups: Sequence[Any] = kv_cache_config.kv_cache_groups
        if vllm_config.cache_config.enable_prefix_caching:
            raise KvfoldError("layers that hold parts have no prefix cache: switch it off")
        if not all(isinstance(group.kv_cache_spec, PartSpec) for group in groups):
            raise KvfoldError(f"layers hold no parts: set {VARIABLE}, or use KvfoldConnector")
        super().__init__(vllm_config, role, kv_cache_config)
        if self.scheduler_side is not None:
            self.scheduler_side.groups = [
                CacheGroup(
                    [extract_layer_index(n) for n in group.layer_names], group.kv_cache_spec.part
                )
                for group in groups
            ]

    SchedulerSide = PartsSchedulerSide

    def kinds(self, kv_cache_config: Any) -> int:
        """One: the groups differ by their part only."""
        return 1

    def served_folder(self, folder: str, block: int) -> ServedFolder:
        """Context files with counts equalized layer by layer."""
        return ServedFolder(folder, Parts.of(os.environ[VARIABLE], block).level)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Forgets the request; its pages of all groups can be freed at once."""
        return self.request_finished(request, [])

    def load_failed(self, load: ContextLoad, problem: Exception) -> None:
        """Raises the error: vLLM cannot fail pages of several groups."""
        raise problem

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Refused requests, as loads that have finished and failed."""
        _, refused = self.get_finished(finished_req_ids)
        failed = refused or set()
        return KVConnectorTransferResults(finished_recving=set(failed), failed_recving=set(failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """No pages: `get_transfer_results` names failed requests instead."""
        self._failed.clear()
        return set()
