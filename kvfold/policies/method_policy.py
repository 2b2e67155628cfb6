# SPDX-License-Identifier: Apache-2.0
"""`Policy`: a method as a function of one row's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from kvfold.budget import Budget
from kvfold.cache.plan import checked_budget
from kvfold.cache.spans import Span, spans_of
from kvfold.errors import KvfoldError
from kvfold.methods.base import Method, Stages, parse
from kvfold.observers.last_queries import window_of
from kvfold.observers.stored import OutputNorms, TokenIds
from kvfold.observers.surprise import SurpriseNeed
from kvfold.policies.kept import Kept
from kvfold.policies.layers import ChoosingState, chosen_in
from kvfold.policies.prefill import Prefill


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
        needs = self._stages.needs
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
        return self._stages.positions != "original"

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
        self._check_inputs(prefill)
        forced = self._stages.forced
        forced = replace(forced, spans=forced.spans + spans_of(protect))
        stages = replace(self._stages, forced=forced)
        allowed = checked_budget(self.method, budget, forced.least)
        return _kept(chosen_in(stages, allowed, prefill, seed), prefill)

    @cached_property
    def _stages(self) -> Stages:
        return replace(self.method.stages(), method=str(self.method))

    def _check_inputs(self, prefill: Prefill) -> None:
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
    stages = made._stages
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


def _kept(states: list[ChoosingState], prefill: Prefill) -> Kept:
    forced = torch.zeros(prefill.tokens, dtype=torch.bool, device=prefill.keys[0].device)
    for state in states:
        if state.chosen is not None:
            forced |= state.chosen.forced[0].any(0)
    return Kept(
        tuple(_of_layer(state, prefill) for state in states),
        prefill.tokens,
        tuple(None if state.chosen is None else state.chosen.scores[0] for state in states),
        forced,
    )


def _of_layer(state: ChoosingState, prefill: Prefill) -> tuple[Tensor, ...]:
    if state.chosen is None:
        everything = torch.arange(prefill.tokens, device=state.stored().keys.device)
        return (everything,) * prefill.heads
    return tuple(slots[slots >= 0] for slots in state.chosen.slots[0])
