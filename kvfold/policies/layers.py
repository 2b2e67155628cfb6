# SPDX-License-Identifier: Apache-2.0
"""The cache's prefill eviction over an engine's tensors: choices are noted, no entry moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvfold.budget import Budget
from kvfold.cache.barrier import Barrier
from kvfold.cache.observe import observation_of
from kvfold.cache.phase import Phase
from kvfold.cache.plan import Plan
from kvfold.cache.prefill import end_with, size_and_evict
from kvfold.cache.state import LayerState
from kvfold.errors import KvfoldError
from kvfold.fitted.sources import KINDS, Sources, fitted_for_engine, with_parts
from kvfold.kernels.column_sums import attend_with_moments
from kvfold.kernels.full_precision import full_precision
from kvfold.kernels.projected_norms import gram, l1_norms, l2_norms
from kvfold.methods.base import Stages
from kvfold.methods.stages.select.choose import Chosen
from kvfold.methods.stages.when import Once
from kvfold.observers.call import AttentionCall
from kvfold.observers.column_sums import ColumnSquares, ColumnSums
from kvfold.observers.of_layer import Observers
from kvfold.observers.stored import OutputNorm
from kvfold.policies.prefill import Prefill
from kvfold.store.dense import DenseStore
from kvfold.store.sequence import LogicalSequence


@dataclass(eq=False)
class ChoosingState(LayerState):
    """A layer whose eviction notes its choice, and moves no entry; None if every entry stays."""

    chosen: Chosen | None = None

    def applies(self, chosen: Chosen) -> bool:
        """Notes what is chosen."""
        self.chosen = chosen
        return False


@full_precision
def chosen_in(
    stages: Stages, budget: Budget | None, prefill: Prefill, seed: int
) -> list[ChoosingState]:
    """Layer states whose `chosen` tells what the eviction at the prefill's end keeps.

    Raises KvfoldError as the stages do.
    """
    states = _states(stages, budget, prefill, seed)
    for layer, state in enumerate(states):
        keys, values = prefill.keys[layer][None], prefill.values[layer][None]
        state.put(DenseStore.sharing(keys, values), LogicalSequence(prefill.tokens))
        logits = prefill.logits_of(layer)
        call = AttentionCall(prefill.queries_of(layer), keys, values, logits)
        if ColumnSums in stages.needs:
            squares = ColumnSquares in stages.needs
            _, sums, of_squares = attend_with_moments(*call[:3], None, squares=squares, **logits)
            state.observers.read(state, call._replace(sums=sums, squares=of_squares))
        state.observers.read_piece(state, call)
        end_with(state, call)
        if isinstance(stages.when, Once):  # at the first generated token, of which nothing is read
            size_and_evict(state, observation_of(state, call))
    return states


def _states(
    stages: Stages, budget: Budget | None, prefill: Prefill, seed: int
) -> list[ChoosingState]:
    needs, count = stages.needs, prefill.layers
    ropes = {rope for rope in map(prefill.rope_of, range(count)) if rope is not None}
    known = [rope.frequencies.cpu().float() for rope in ropes]
    *found, parts = (
        fitted_for_engine(each, count, prefill.heads, known) for each in Sources.of(stages)
    )
    fits = {kind: each for kind, each in zip(KINDS, found, strict=True) if each is not None}
    stages = with_parts(stages, parts)
    ids = None if prefill.token_ids is None else prefill.token_ids[None]
    # `until`: a window of one query is a prefill's too.
    phase, barrier = Phase(until=prefill.tokens, incoming=ids), Barrier[LayerState]()
    return [
        ChoosingState(
            Plan(stages, budget, layer, count, seed, *_model_of(prefill, layer)),
            phase,
            barrier,
            Observers.of(needs, {kind: each.of_layer(layer) for kind, each in fits.items()}),
        )
        for layer in range(count)
    ]


def _model_of(prefill: Prefill, layer: int) -> tuple[Any, Any]:
    """The layer's RoPE, which moves nothing in a layer without, and its W_o; None if not given."""
    rotation = None if prefill.rope is None else prefill.rope_of(layer) or unmoved
    weights = prefill.output_weights
    return rotation, None if weights is None else OutputWeight(weights[layer])


def unmoved(keys: Tensor, shift: Tensor) -> Tensor:
    """Keys `[B, H, n, D]` of a layer without RoPE, which are the same at all positions."""
    return keys


@dataclass(frozen=True, eq=False)
class OutputWeight:
    """W_o `[Dm, Hq·Dv]` of one layer."""

    weight: Tensor

    def norms(self, values: Tensor, kind: OutputNorm, query_heads: int) -> Tensor:
        """Norms `[B, Hq, T]`, float32, of `values [B, H, T, Dv]` that each query head projects."""
        wanted = query_heads * values.shape[3]
        if self.weight.dim() != 2 or self.weight.shape[1] != wanted:
            raise KvfoldError(
                f"output weights {list(self.weight.shape)} of {query_heads} query heads of size "
                f"{values.shape[3]}: give [Dm, {wanted}] for each layer"
            )
        by_head = self.weight.unflatten(1, (query_heads, -1)).transpose(0, 1)
        return l1_norms(values, by_head) if kind == "l1" else l2_norms(values, gram(by_head))
