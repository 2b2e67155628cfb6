# SPDX-License-Identifier: Apache-2.0
"""vLLM on a CPU: one GiB of pages, one thread for each worker, no network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from kvfold.serve.vllm.placeholders import ServedFolder
    from tests_vllm.bundled import Kvfold

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contexts")


@pytest.fixture(scope="session")
def made(folder: Path) -> Kvfold:
    from tests_vllm.bundled import Kvfold  # after the variables above

    return Kvfold.with_files_in(folder)


@pytest.fixture(scope="session")
def served_folder(made: Kvfold, folder: Path) -> ServedFolder:
    from kvfold.serve.vllm.placeholders import ServedFolder

    return ServedFolder(folder)
