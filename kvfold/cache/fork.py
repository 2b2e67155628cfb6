# SPDX-License-Identifier: Apache-2.0
"""Forks: caches that read on from another one and share its entries."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.cache.barrier import Barrier
from kvfold.cache.cache import CompressedCache
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.model_binding import ModelBinding
from kvfold.cache.phase import Phase
from kvfold.cache.state import LayerState
from kvfold.errors import BudgetError
from kvfold.hf.models import read_tokens
from kvfold.methods.base import Stages
from kvfold.methods.stages.allocate.uniform import uniform
from kvfold.methods.stages.score.position import recency
from kvfold.methods.stages.select.forced import Forced
from kvfold.observers.reconstruction import ContextReconstruction
from kvfold.observers.references import ReferencesNeed
from kvfold.observers.stored import KeysBeforeRope
from kvfold.observers.surprise import SurpriseNeed


def fork(cache: CompressedCache) -> CompressedCache:
    """A cache that shares all entries of `cache`, and stores only the tokens that it reads itself.

    It evicts and encodes nothing, and its own tokens can be cropped. Any number of forks may read
    at the same time, each in a thread of its own, as long as `cache` reads nothing itself. Only the
    states of sliding and recurrent layers, which are small, are copied.
    """
    old = cache.phase
    phase = Phase(old.reads_ids, frozen=True, prefix=old.prefix, history=old.history)
    barrier: Barrier[LayerState] = Barrier()
    binding = copy.deepcopy(cache.binding)
    binding.answered()
    layers = [
        _fork_layer(layer, phase, barrier, binding)
        if isinstance(layer, CompressedLayer)
        else copy.deepcopy(layer)
        for layer in cache.layers
    ]
    forward = dataclasses.replace(cache.forward)
    return cache.copied(
        layers=layers, phase=phase, binding=binding, forward=forward, reads_logits=False
    )


def _fork_layer(
    layer: CompressedLayer, phase: Phase, barrier: Barrier[LayerState], binding: ModelBinding
) -> CompressedLayer:
    state = layer.state
    # Sinks move by the number of evicted tokens only, and a fork evicts none.
    state.settle_sinks()
    own = dataclasses.replace(
        state,
        phase=phase,
        barrier=barrier,
        store=state.stored().fork(),
        sequence=dataclasses.replace(state.sequence),
        evicted_at=state.seen,
        settled=state.seen,
        reindexed=None,
        surplus=None,
        observers=state.observers.fresh(),
    )
    if KeysBeforeRope in state.needs:
        own.observers.moves.set(state.key_moves())
    return layer.copied(own, binding)


def fork_within(cache: CompressedCache, size: int) -> CompressedCache:
    """As `fork`, with a budget of its own: `end_turn` evicts to `own` entries per KV head.

    Only entries that the fork read itself are evicted, by the method's scores. The newest stay if
    it has none, or if its scores take its own forwards (KVzip) or logits (SirLLM). Nothing is
    merged, and all layers and heads keep equally many. Raises BudgetError for less than one entry,
    or than the method's window.
    """
    stages = own_stages(cache.method.stages())
    least = max(1, stages.forced.least)
    if size < least:
        raise BudgetError(
            f"later turns of {cache.method} keep at least {least} entries per KV head, the budget "
            f"is {size}: raise it"
        )
    reader = fork(cache)
    reader.phase.keep_own(size)
    for layer in reader.compressed_layers:
        state = layer.state
        observers = state.observers.adopted(stages.needs, {})
        plan = dataclasses.replace(state.plan, stages=stages, keep_scores=False)
        state.adopt(plan, observers)
        state.end_round()  # rounds are those of the document's method
    return reader


def own_stages(stages: Stages) -> Stages:
    """Stages for a fork's own entries, after a document that was compressed by `stages`."""
    apart = ContextReconstruction in stages.needs or SurpriseNeed in stages.needs
    if stages.score is None or apart:
        return Stages(score=recency, allocate=uniform)
    forced = Forced(recent=stages.forced.recent)
    needs = stages.needs.without(ReferencesNeed)
    return Stages(needs=needs, score=stages.score, allocate=uniform, forced=forced)


@torch.no_grad()
def end_turn(
    model: PreTrainedModel, reader: CompressedCache, ids: Tensor, chunk: int | None = None
) -> None:
    """Reads the rest of a turn, `ids [1, N]`, into a fork of `fork_within`, and compresses it.

    `chunk`: tokens per forward; None: all at once. After an error the fork must not be used again.
    """
    reader.phase.freeze(False)
    rest = ids[:, reader.get_seq_length() :]
    try:
        with reader.reading(until=ids.shape[1]):
            for piece in rest.split(chunk or max(1, rest.shape[1]), 1):
                read_tokens(model, piece, reader, None)
    finally:
        reader.phase.freeze(True)
