# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers that begin anew in every forward of several tokens (Jamba, Zamba).

Their scan takes no initial state, so that a question after a document, or a second piece of one,
would be read as if nothing came before. One token at a time they go on from their state.
"""

from __future__ import annotations

import copy
from weakref import WeakSet

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from kvfold.hf.versions import CACHE

_restarting: WeakSet[PreTrainedModel] = WeakSet()


def restarts(model: PreTrainedModel) -> bool:
    """True if `note_restarts` found recurrent layers that begin anew."""
    return model in _restarting


@torch.no_grad()
def note_restarts(model: PreTrainedModel) -> None:
    """Finds out whether two tokens at once leave the same states, whatever there was before."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    if not any(isinstance(layer, LinearAttentionLayer) for layer in cache.layers):
        return
    ids = torch.ones((1, 4), dtype=torch.long, device=model.device)
    model(input_ids=ids, use_cache=True, **{CACHE: cache})
    other = copy.deepcopy(cache)
    for state in _states(other):
        state.zero_()
    for one in (cache, other):
        model(input_ids=ids[:, :2], use_cache=True, **{CACHE: one})
    pairs = list(zip(_states(cache), _states(other), strict=True))
    if pairs and all(torch.equal(a, b) for a, b in pairs):
        _restarting.add(model)


def _states(cache: DynamicCache) -> list[torch.Tensor]:
    """All recurrent states; convolutions are no such states."""
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    states = (state for layer in layers for state in layer.recurrent_states.values())
    return [state for state in states if state is not None]
