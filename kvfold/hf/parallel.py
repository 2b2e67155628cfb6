# SPDX-License-Identifier: Apache-2.0
"""Loading of a model that several processes share, as transformers does it."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import transformers
from packaging.version import Version

from kvfold.errors import KvfoldError
from kvfold.hf.versions import PARALLEL_FROM


def parallel_options() -> dict[str, Any]:
    """Options of `from_pretrained` that share a model among the processes of torchrun.

    Empty in a single process. Raises KvfoldError if a package is missing or too old.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return {}
    if Version(transformers.__version__) < PARALLEL_FROM:
        raise KvfoldError(
            f"several ranks need transformers {PARALLEL_FROM} or newer, this is "
            f"{transformers.__version__}: update it, or use one process"
        )
    if importlib.util.find_spec("accelerate") is None:
        raise KvfoldError("several ranks need accelerate: pip install 'kvfold[parallel]'")
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size)}
