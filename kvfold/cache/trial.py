# SPDX-License-Identifier: Apache-2.0
"""A few tokens through a model whose cache evicts, before anybody trusts its answers.

What the attention function notices (`attention/function.py`) comes up here, when a model's first
cache is made: another number of attention calls than of cache updates, keys or values that are
changed on the way, masks made from what is stored, caches of a class of its own.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.cache.layer import CompressedLayer
from kvfold.errors import KvfoldError, UnsupportedModel
from kvfold.hf.models import read_tokens

METHOD, BUDGET = "local_window", 4
FORWARDS = (6, 1, 2)  # tokens: a prompt that is evicted from, a decode step, a later turn

_tried: WeakSet[PreTrainedModel] = WeakSet()


def is_due(model: PreTrainedModel) -> bool:
    """Whether the model has weights and no cache was made for it yet; true once."""
    if model in _tried or model.device.type == "meta":
        return False
    _tried.add(model)
    return True


def run(model: PreTrainedModel, cache: Cache) -> None:
    """Raises UnsupportedModel, and forgets that it was done, where the model cannot go on."""
    try:
        _read(model, cache)
    except BaseException:
        _tried.discard(model)
        raise


def _read(model: PreTrainedModel, cache: Cache) -> None:
    name = type(model).__name__
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        # Dropout of a model that is being trained draws numbers that are the user's.
        with torch.random.fork_rng(devices):
            for tokens in FORWARDS:
                ids = torch.ones((1, tokens), dtype=torch.long, device=model.device)
                read_tokens(model, ids, cache, None)
    except (KvfoldError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise UnsupportedModel(
            f"{name} cannot read on with a cache that holds fewer entries than it has seen: "
            f"{problem}"
        ) from problem
    seen = {x.get_seq_length() for x in cache.layers if isinstance(x, CompressedLayer)}
    if seen != {sum(FORWARDS)}:
        raise UnsupportedModel(
            f"{name} does not write every token to every layer of its cache: nothing to compress"
        )
