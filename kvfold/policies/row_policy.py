# SPDX-License-Identifier: Apache-2.0
"""`RowPolicy`: a policy over one row, when its prompt ends and in rounds of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.budget import Budget
from kvfold.cache.plan import checked_budget
from kvfold.cache.rounds import evict_round
from kvfold.errors import KvfoldError
from kvfold.kernels.full_precision import full_precision
from kvfold.kernels.logits import LogitOptions
from kvfold.observers.call import AttentionCall
from kvfold.policies.method_policy import ChoosingState, Kept, Policy, chosen_in, kept_of
from kvfold.policies.prefill import Prefill
from kvfold.store.dense import DenseStore
from kvfold.store.sequence import LogicalSequence


@dataclass(frozen=True, eq=False)
class StoredRow:
    """Entries of one row that are left, and what came after: heads may hold different numbers.

    Keys are as attention reads them, after RoPE.
    """

    keys: Sequence[Sequence[Tensor]]  # of each layer and KV head [n, D]
    values: Sequence[Sequence[Tensor]]  # [n, Dv]
    tokens: Sequence[Sequence[Tensor]]  # [n], the entries' tokens, int64, ascending
    seen: int  # tokens of the row
    queries: Sequence[Tensor] | None = None  # of each layer [Hq, W, D], of the last W tokens


class RowPolicy:
    """What `policy` keeps of one row: when its prompt ends, and in rounds of its answer.

    As in `CompressedCache`, sizes that are made when the prompt ends hold in later rounds. Entries
    stay the engine's. Raises BudgetError as `Policy.keep`.
    """

    def __init__(
        self, policy: Policy, budget: Budget | float | str | None, *, seed: int = 0
    ) -> None:
        self.policy, self.seed = policy, seed
        self.stages = policy.stages
        self.budget = checked_budget(policy.method, budget, self.stages.forced.least)
        self._states: list[ChoosingState] = []
        self._logits: list[LogitOptions] = []

    @torch.no_grad()
    def prompt(self, prefill: Prefill) -> Kept:
        """The entries that each KV head keeps when the prompt ends; raises as `Policy.keep`."""
        self.policy.check_inputs(prefill)
        self._states = chosen_in(self.stages, self.budget, prefill, self.seed)
        self._logits = [prefill.logits_of(layer) for layer in range(prefill.layers)]
        return kept_of(self._states, prefill)

    @torch.no_grad()
    @full_precision
    def round(self, stored: StoredRow) -> list[list[Tensor]] | None:
        """Indices among the entries of each layer and KV head that stay, ascending; None: all.

        Raises KvfoldError for a method without rounds, or that sums attention up while it reads,
        and as the method does.
        """
        if self.stages.rounds is None or self.policy.needs.queries == "all":
            raise KvfoldError(
                f"{self.policy.method} has no rounds over an engine's entries: take one that "
                "scores by entries or last queries, with every"
            )
        for layer, state in enumerate(self._states):
            state.chosen = None
            keys, values = (_padded(part[layer], 0) for part in (stored.keys, stored.values))
            tokens = _padded(stored.tokens[layer], -1)
            named = {"keys": list(keys), "values": list(values), "positions": list(tokens)}
            state.put(DenseStore.from_named(named, len(keys), 0), LogicalSequence(stored.seen))
            queries = keys[None, :, :0] if stored.queries is None else stored.queries[layer][None]
            window, width = state.observers.window.answer, queries.shape[2]
            window.clear()
            if width:
                first = stored.seen - width
                columns = torch.arange(first, stored.seen, device=queries.device)[None]
                window.add(queries, columns)
            call = AttentionCall(queries, keys[None], values[None], self._logits[layer])
            evict_round(state, call)
            state.end_round(0)
        if all(state.chosen is None for state in self._states):
            return None
        return [
            _staying(state, of_layer)
            for state, of_layer in zip(self._states, stored.tokens, strict=True)
        ]


def _padded(heads: Sequence[Tensor], fill: int) -> Tensor:
    """Rows of heads in one tensor `[H, T, …]`, those of shorter ones behind `fill`."""
    return pad_sequence(list(heads), batch_first=True, padding_value=fill, padding_side="left")


def _staying(state: ChoosingState, tokens: Sequence[Tensor]) -> list[Tensor]:
    """Indices among each head's entries that a layer keeps."""
    if state.chosen is None:
        return [torch.arange(len(head), device=head.device) for head in tokens]
    most = max(len(head) for head in tokens)
    return [
        slots[slots >= 0] - (most - len(head))
        for slots, head in zip(state.chosen.slots[0], tokens, strict=True)
    ]
