# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism as transformers sets it up: loading, and which KV heads a rank holds."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from kvfold.cache.tensor_parallel import Ranks
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.hf.models import caches_latents, text_config
from kvfold.hf.stock_layers import is_recurrent, stock_layers
from kvfold.hf.versions import PARALLEL_FROM


def parallel_options() -> dict[str, Any]:
    """What lets `from_pretrained` share a model out among the processes that torchrun started.

    Nothing in a single process. Raises KvfoldError for what is missing, or too old, for it.
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
        raise KvfoldError("several ranks need accelerate: pip install kvfold[parallel]")
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=size)}


def ranks_of(model: PreTrainedModel) -> Ranks:
    """Which of the model's KV heads this process holds.

    Raises UnsupportedModel where ranks would not hold equally many heads of their own.
    """
    size, name = getattr(model, "tp_size", None) or 1, type(model).__name__
    if size == 1:
        return Ranks()
    heads = getattr(text_config(model), "num_key_value_heads", None)
    reason = None
    if Version(transformers.__version__) < PARALLEL_FROM:
        reason = f"is shared out by transformers before {PARALLEL_FROM}"
    elif torch.distributed.get_world_size() != size:
        reason = "is not shared out among all processes"
    elif caches_latents(model):
        reason = "caches latents, which every rank holds whole"
    elif any(is_recurrent(layer) for layer in stock_layers(model)):
        reason = "has recurrent layers, whose states have no KV heads"
    elif not isinstance(heads, int):
        reason = "does not say how many KV heads it has"
    elif heads % size:
        reason = f"has {heads} KV heads, not a multiple of {size}"
    if reason is not None:
        raise UnsupportedModel(
            f"{name} {reason}: {size} ranks cannot share it by its heads, load it in one process"
        )
    assert isinstance(heads, int)
    return Ranks(torch.distributed.get_rank(), size, heads)
