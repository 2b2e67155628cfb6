# SPDX-License-Identifier: Apache-2.0
"""`Kept`: the entries that a policy keeps, for each head by itself or one set for all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.methods.stages.select.one_set import Rule, one_set


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
