# SPDX-License-Identifier: Apache-2.0
"""LMCache's KV cache SDK: an edit between retrieve and store that drops tokens by a method.

`batch.modify(LMCacheEdit("snapkv", 0.5, head_size=128, rope=rope))`. LMCache is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvfold.budget import Budget
from kvfold.errors import BudgetError, KvfoldError
from kvfold.methods.base import Method
from kvfold.methods.stages.select.one_set import Rule
from kvfold.policies.method_policy import Policy, policy
from kvfold.policies.prefill import Prefill, Ropes, rope_of, split_heads
from kvfold.policies.sharing import SharingLoss, sharing_loss


@dataclass(frozen=True, eq=False)
class LMCacheEdit:
    """An LMCache edit function: (tensors by kind, token ids) → (smaller KV, kept token ids).

    LMCache stores whole tokens, so all layers and heads keep one set of them; see `Kept.shared`.
    Their number is rounded down to a multiple of `chunk`, LMCache's chunk size, as it drops the
    rest of a chunk. Kept keys are rotated to the positions 0, 1, …, at which the engine will take
    them to be. Raises KvfoldError for a method that reads what LMCache does not have, and when
    called, for tensors that do not fit.
    """

    method: Method | str
    budget: Budget | float | str | None
    head_size: int
    rope: Ropes | None  # of the model, or of each layer; None: it rotates nothing
    rule: Rule = "mass"
    chunk: int = 256
    scale: float | None = None  # of the logits; None: 1/√D
    softcap: float | None = None
    on_report: Callable[[SharingLoss], None] | None = None  # told what one set for all heads loses
    policy: Policy = field(init=False)

    def __post_init__(self) -> None:
        made = policy(self.method)
        if made.needs.output_weights:
            raise KvfoldError(f"{made.method} reads the model's weights, which LMCache lacks")
        if made.needs.rope and self.rope is None:
            raise KvfoldError(f"{made.method} reads keys or queries before RoPE: give rope=")
        if self.chunk < 1:
            raise KvfoldError(f"chunk is LMCache's number of tokens in a chunk, not {self.chunk}")
        object.__setattr__(self, "policy", made)

    def __call__(
        self, tensors: Mapping[Any, Tensor], tokens: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """Edits keys and values `[2, L, T, H·D]` of T `tokens`; queries are `[1, L, T, Hq·D]`."""
        by_kind = {getattr(kind, "value", kind): tensor for kind, tensor in tensors.items()}
        kv, ids = by_kind.get("kv"), list(tokens)
        if kv is None or kv.dim() != 4 or len(kv) != 2 or kv.shape[2] != len(ids):
            shape = None if kv is None else list(kv.shape)
            raise KvfoldError(f"KV {shape} of {len(ids)} tokens: [2, L, {len(ids)}, H·D] is wanted")
        prefill = self._prefill(kv, by_kind.get("query"), ids)
        kept = self.policy.keep(prefill, self._sized(prefill))
        union = self.rule == "union"  # of it those of most heads, in whole chunks
        size = len(kept.shared("union")) if union else int(kept.counts.sum()) // kept.counts.numel()
        slots = kept.shared("votes" if union else self.rule, self._whole_chunks(size))
        if self.on_report is not None:
            self.on_report(sharing_loss(kept, slots, prefill))
        if len(slots) == len(ids):
            return kv, ids
        return self._edited(kv, slots), [ids[slot] for slot in slots.tolist()]

    def _prefill(self, kv: Tensor, queries: Tensor | None, tokens: list[int]) -> Prefill:
        needs = self.policy.needs
        if queries is not None and queries.shape[-2] != len(tokens):
            raise KvfoldError(
                f"LMCache gave queries of {queries.shape[-2]} tokens beside {len(tokens)} of KV: "
                "retrieve both once both are stored"
            )
        if queries is None and needs.queries:
            raise KvfoldError(
                f"{self.policy.method} reads queries: give create_request a context of "
                "lmcache.sdk.qcache as well, and start server and engine with query transfer"
            )
        keys, values = split_heads(kv, self.head_size)
        if queries is not None:
            queries = split_heads(queries.view(-1, *queries.shape[-2:]), self.head_size)
        return Prefill(
            keys,
            values,
            queries,
            rope=self.rope,
            token_ids=torch.tensor(tokens),
            scale=self.scale,
            softcap=self.softcap,
        )

    def _sized(self, prefill: Prefill) -> Budget | None:
        """The budget in whole chunks of tokens; None for a method that takes none."""
        if self.budget is None:
            return None
        keys, values = prefill.keys[0], prefill.values[0]
        entry = (keys.shape[2] + values.shape[2]) * keys.element_size()
        layers, heads = prefill.layers, prefill.heads
        total = Budget.of(self.budget).per_layer(prefill.tokens, entry, layers, heads, rows=1)
        return Budget.tokens(self._whole_chunks(min(prefill.tokens, total // layers)))

    def _whole_chunks(self, tokens: int) -> int:
        """`tokens`, rounded down to a multiple of a chunk; BudgetError if that is none."""
        if tokens < self.chunk:
            raise BudgetError(
                f"the budget keeps {tokens} tokens, and LMCache stores whole chunks of "
                f"{self.chunk}: raise the budget, or take a smaller chunk size"
            )
        return tokens // self.chunk * self.chunk

    def _edited(self, kv: Tensor, slots: Tensor) -> Tensor:
        """Copy `[2, L, K, H·D]` of the tokens at `slots [K]`, keys at their new positions."""
        edited = kv.new_empty(*kv.shape[:2], len(slots), kv.shape[3])
        shift = (torch.arange(len(slots), device=slots.device) - slots)[None]
        for layer in range(kv.shape[1]):
            torch.index_select(kv[1, layer], 0, slots, out=edited[1, layer])
            keys = kv[0, layer].index_select(0, slots)
            rope = rope_of(self.rope, layer)
            if rope is not None:
                turned = rope(split_heads(keys, self.head_size)[None], shift)
                keys = turned[0].transpose(0, 1).flatten(1)
            edited[0, layer] = keys
        return edited
