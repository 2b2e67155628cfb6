# SPDX-License-Identifier: Apache-2.0
"""`Policy`: a method as a function of one row's tensors, which gives what it keeps.

The cache's own prefill eviction runs over them: choices are noted, no entry moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from kvfold.budget import Budget
from kvfold.cache.barrier import Barrier
from kvfold.cache.observe import observation_of
from kvfold.cache.phase import Phase
from kvfold.cache.plan import Plan, checked_budget
from kvfold.cache.prefill import end_with, size_and_evict
from kvfold.cache.spans import Span, spans_of
from kvfold.cache.state import LayerState
from kvfold.errors import KvfoldError
from kvfold.fitted.sources import KINDS, Sources, fitted_for_engine, with_parts
from kvfold.kernels.column_sums import attend_with_moments
from kvfold.kernels.full_precision import full_precision
from kvfold.kernels.projected_norms import gram, l1_norms, l2_norms
from kvfold.methods.base import Method, Stages, parse
from kvfold.methods.stages.select.choose import Chosen
from kvfold.methods.stages.select.one_set import Rule, one_set
from kvfold.methods.stages.when import Once
from kvfold.observers.call import AttentionCall
from kvfold.observers.column_sums import ColumnSquares, ColumnSums
from kvfold.observers.last_queries import window_of
from kvfold.observers.of_layer import Observers
from kvfold.observers.stored import OutputNorm, OutputNorms, TokenIds
from kvfold.observers.surprise import SurpriseNeed
from kvfold.policies.prefill import Prefill
from kvfold.store.dense import DenseStore
from kvfold.store.sequence import LogicalSequence


@dataclass(frozen=True, eq=False)
class Kept:
    """Entries of one row that each KV head keeps.

    `indices[layer][head]` are numbers of tokens, int64, ascending; heads may differ in how many.
    """

    indices: tuple[tuple[Tensor, ...], ...]
    tokens: int  # T
    scores: tuple[Tensor | None, ...]  # [H, T] of each layer; None where every entry stays
    forced: Tensor  # [T], bool: tokens that stay in some head whatever their score

    @property
    def counts(self) -> Tensor:
        """Entries that each head keeps `[L, H]`."""
        return torch.tensor([[len(head) for head in layer] for layer in self.indices])

    def mask(self) -> Tensor:
        """Bool mask `[L, H, T]` of the entries that stay."""
        heads = [head for layer in self.indices for head in layer]
        mask = torch.zeros(len(heads), self.tokens, dtype=torch.bool, device=self.forced.device)
        for row, head in zip(mask, heads, strict=True):
            row[head] = True
        return mask.view(len(self.indices), -1, self.tokens)

    def shared(self, rule: Rule = "mass", size: int | None = None) -> Tensor:
        """Indices `[K]`, ascending, of one set of tokens for all layers and heads.

        An engine whose block tables hold whole tokens needs one set. `rule`, `size` and errors as
        of `methods/stages/select/one_set.py`: "mass" by scores, "votes" of most heads, or "union".
        """
        return one_set(self.mask(), self.scores, self.forced, rule, size)


@dataclass(frozen=True)
class PolicyNeeds:
    """Inputs of a policy beside keys and values."""

    queries: int | Literal["all"]  # of the last so many tokens, or of all; 0: none
    rope: bool  # un-rotates keys or queries
    token_ids: bool
    output_weights: bool  # W_o of each layer
    budget: bool  # False: the method finds its sizes itself


@dataclass(frozen=True)
class Policy:
    """The entries that `method` keeps when a prompt ends, from an engine's own tensors.

    It runs the eviction of `CompressedCache`, stage by stage, and keeps the same entries. The state
    of an engine stays the engine's: a policy holds none, and may be used from several threads.
    """

    method: Method

    @cached_property
    def needs(self) -> PolicyNeeds:
        """Inputs of `keep` beside keys and values."""
        needs = self.stages.needs
        fitted = {need for need in needs.observed if getattr(need, "file", None) is not None}
        everything = any(need.while_reading for need in needs.observed if need not in fitted)
        return PolicyNeeds(
            "all" if everything else window_of(needs),
            rope=needs.rotated_back,
            token_ids=TokenIds in needs,
            output_weights=OutputNorms in needs,
            budget=self.method.takes_budget,
        )

    @property
    def moves_keys(self) -> bool:
        """True if the method rotates kept keys to other positions, which is the engine's to do."""
        return self.stages.positions != "original"

    @torch.no_grad()
    def keep(
        self,
        prefill: Prefill,
        budget: Budget | float | str | None = None,
        *,
        protect: Sequence[Span] = (),
        seed: int = 0,
    ) -> Kept:
        """The entries of one row that each KV head keeps.

        Args:
            prefill: the row's tensors; `needs` says which beside keys and values.
            budget: as of `CompressedCache`: the part to keep (0.2), tokens (512), bytes ("1GiB").
            protect: spans of tokens that stay, half open.
            seed: of random choices.

        Raises KvfoldError where something is missing, and as the method does; BudgetError for a
        budget that is missing, superfluous or too small.
        """
        self.check_inputs(prefill)
        forced = self.stages.forced
        forced = replace(forced, spans=forced.spans + spans_of(protect))
        stages = replace(self.stages, forced=forced)
        allowed = checked_budget(self.method, budget, forced.least)
        return kept_of(chosen_in(stages, allowed, prefill, seed), prefill)

    @cached_property
    def stages(self) -> Stages:
        """The method's stages, with its text."""
        return replace(self.method.stages(), method=str(self.method))

    def check_inputs(self, prefill: Prefill) -> None:
        """Raises KvfoldError where `prefill` lacks what the method reads."""
        needs, wanted = self.needs, self.needs.queries
        count = prefill.tokens if wanted == "all" else min(wanted, prefill.tokens)
        exactly = wanted == "all" and prefill.window != count
        if prefill.window < count or exactly:
            raise KvfoldError(
                f"{self.method} reads the queries of "
                f"{'all tokens' if wanted == 'all' else f'the last {count} tokens'}: give queries= "
                f"of {count} tokens in each layer, not {prefill.window}"
            )
        for name in ("rope", "token_ids", "output_weights"):
            if getattr(needs, name) and getattr(prefill, name) is None:
                raise KvfoldError(f"{self.method} reads more of the model: give {name}=")


def policy(method: Method | str) -> Policy:
    """The policy of a method, or of its text such as "snapkv:window=16 + adakv".

    Raises KvfoldError for a method that runs forwards of its own (KVzip) or reads logits (SirLLM),
    that evicts nothing or nothing of a prompt, or that changes entries: a policy chooses among them
    only.
    """
    made = Policy(parse(method))
    stages = made.stages
    reason = None
    if stages.runs_own_forwards:
        reason = "runs forwards of its own over the prompt, which take the model"
    elif SurpriseNeed in stages.needs:
        reason = "scores tokens by the model's logits, which an engine's cache does not have"
    elif stages.encode is not None:
        reason = "stores entries otherwise than they came"
    elif stages.merge is not None or stages.refit is not None:
        reason = "changes the entries that it keeps"
    elif stages.score is None:
        reason = "keeps every entry"
    if reason is not None:
        raise KvfoldError(f"{made.method} {reason}, and a policy only chooses: use CompressedCache")
    if stages.keeps_prompt:
        raise KvfoldError(
            f"{made.method} keeps the whole prompt beside its budget, and a policy chooses among a "
            "prompt's entries: set prompt=counted"
        )
    return made


def kept_of(states: list[ChoosingState], prefill: Prefill) -> Kept:
    """What the states of a prompt's layers have chosen."""
    forced = torch.zeros(prefill.tokens, dtype=torch.bool, device=prefill.keys[0].device)
    for state in states:
        if state.chosen is not None:
            forced |= state.chosen.forced[0].any(0)
    indices = tuple(_of_layer(state, prefill) for state in states)
    scores = tuple(None if state.chosen is None else state.chosen.scores[0] for state in states)
    return Kept(indices, prefill.tokens, scores, forced)


def _of_layer(state: ChoosingState, prefill: Prefill) -> tuple[Tensor, ...]:
    if state.chosen is None:
        everything = torch.arange(prefill.tokens, device=state.stored().keys.device)
        return (everything,) * prefill.heads
    return tuple(slots[slots >= 0] for slots in state.chosen.slots[0])


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
