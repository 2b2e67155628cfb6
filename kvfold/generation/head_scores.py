# SPDX-License-Identifier: Apache-2.0
"""Files of KV head scores, computed once on another text (KVzip)."""

from __future__ import annotations

import pickle

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.observers.reconstruction import ContextReconstruction
from kvfold.reading import stable_path

# Errors of safetensors and torch for files that they cannot read, or with other contents
UNREADABLE = (
    OSError, SafetensorError, ValueError, RuntimeError, AttributeError, EOFError,
    pickle.UnpicklingError,
)  # fmt: skip


def give_head_scores(cache: CompressedCache, file: str) -> None:
    """Sets the reconstruction score of every entry to its KV head's score from a file.

    Raises KvfoldError if the file cannot be read or does not fit the model's layers and heads.
    """
    states = cache.states
    scores = read_head_scores(file)
    heads = states[0].stored().keys.shape[1] * states[0].plan.ranks.size
    if scores.shape != (len(states), heads):
        raise KvfoldError(
            f"{file} scores {scores.shape[0]} layers of {scores.shape[1]} KV heads, the model has "
            f"{len(states)} of {heads}: take the file that was made with this model"
        )
    for state, of_layer in zip(states, scores, strict=True):
        keys = state.stored().keys
        own = of_layer[state.plan.ranks.own_heads or slice(None)].to(keys.device)
        scores_of = own[None, :, None].expand(keys.shape[:3]).clone()
        state.observers[ContextReconstruction].set(scores_of)


def read_head_scores(file: str) -> Tensor:
    """Scores `[L, H]` float32 of the one tensor, `[L, H]` or `[L, 1, H]`, in a file."""
    try:
        with stable_path(file) as place:
            if file.endswith(".safetensors"):
                (found,) = load_file(place).values()
            else:
                found = torch.load(place, weights_only=True, map_location="cpu")
        scores = found.float()
        scores = scores.squeeze(1) if scores.dim() == 3 else scores
    except UNREADABLE as problem:
        raise KvfoldError(_unreadable(file)) from problem
    if scores.dim() != 2 or not bool(scores.isfinite().all()):
        raise KvfoldError(_unreadable(file))
    return scores


def _unreadable(file: str) -> str:
    return (
        f"cannot read {file} as scores of heads: give a .safetensors or .pt file that holds one "
        "tensor of finite numbers, [layers, KV heads]"
    )
