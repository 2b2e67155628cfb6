# SPDX-License-Identifier: Apache-2.0
"""Input and result of a refit stage: entries with the kept ones named, and reference queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from kvfold.errors import IllegalComposition
from kvfold.kernels.partial_attention import PartOutput

if TYPE_CHECKING:
    from kvfold.methods.base import Stages

HELD = 8  # every 8th reference token judges the fit, and takes no part in it


@dataclass(frozen=True)
class References:
    """Queries that stand for those to come, and what they attend to beside the entries.

    Their axis n is token by token, with the `groups` query heads of each token together. `rest` is
    attention to all else (a text's opening, their own tokens, sink logits), `block` to the entries,
    None if it is still to be computed. `real` is False at padding.
    """

    queries: Tensor  # [B, H, n, D]
    rest: PartOutput  # [B, H, n, Dv] and [B, H, n]
    real: Tensor  # [B, n]
    groups: int  # G
    block: PartOutput | None = None

    @classmethod
    def joined(cls, parts: Sequence[References]) -> References:
        """References of several forwards as one."""
        if len(parts) == 1:
            return parts[0]
        blocks = [each.block for each in parts if each.block is not None]
        return cls(
            torch.cat([each.queries for each in parts], 2),
            _joined([each.rest for each in parts]),
            torch.cat([each.real for each in parts], 1),
            parts[0].groups,
            _joined(blocks) if len(blocks) == len(parts) else None,
        )

    def rows(self) -> Iterator[RowReferences]:
        """References of each row, without padding, the ones that judge the fit last."""
        for row, real in enumerate(self.real):
            index = real.nonzero()[:, 0]
            token = torch.arange(len(index), device=index.device) // self.groups
            judges = token % HELD == HELD - 1
            order = torch.cat([index[~judges], index[judges]])
            yield RowReferences(
                self.queries[row][:, order],
                self.rest.at(row).at(slice(None), order),
                None if self.block is None else self.block.at(row).at(slice(None), order),
                int(judges.sum()),
            )


def _joined(parts: Sequence[PartOutput]) -> PartOutput:
    outs, masses = zip(*parts, strict=True)
    return PartOutput(torch.cat(outs, 2), torch.cat(masses, 2))


class RowReferences(NamedTuple):
    """References of one row; the last `judges` ones judge the fit."""

    queries: Tensor  # [H, n, D]
    rest: PartOutput  # [H, n, Dv] and [H, n]
    block: PartOutput | None
    judges: int

    def judging(self) -> RowReferences:
        """References that judge a fit, without the others."""
        last = slice(None), slice(self.queries.shape[1] - self.judges, None)
        block = None if self.block is None else self.block.at(*last)
        return RowReferences(self.queries[last], self.rest.at(*last), block, self.judges)


@dataclass(frozen=True)
class Compaction:
    """A layer's entries before an eviction, the slots of those that stay, and reference queries."""

    keys: Tensor  # [B, H, T, D]
    values: Tensor  # [B, H, T, Dv]
    bias: Tensor | None  # [B, H, T]
    block: Tensor  # [B, H, T], False at padding and at entries that are kept as they are
    slots: Tensor  # [B, H, K], ascending, −1 for a hole
    references: References
    scale: float
    softcap: float | None = None


@dataclass(frozen=True)
class Refitted:
    """New values `[B, H, K, Dv]` of the kept entries, and their bias `[B, H, K]` if it changes.

    `report [B, 4]`: relative error of the attention output on held-out reference queries, with the
    kept entries as they were, and refitted; heads whose values a guard has held back; entries
    without weight.
    """

    values: Tensor
    bias: Tensor | None
    report: Tensor


class Refit(Protocol):
    """A refit stage."""

    @property
    def gives_bias(self) -> bool:
        """True if entries get a bias, which takes 4 bytes each."""

    def __call__(self, given: Compaction) -> Refitted:
        """New values and biases of the kept entries."""


def check_refit(stages: Stages) -> None:
    """Raises IllegalComposition for stages that a refit cannot follow."""
    if stages.refit is None:
        return
    if stages.merge is not None:
        raise IllegalComposition(
            "a refit starts from keys and values as the model made them, and merging changes "
            "them: choose one of the two"
        )
    need = stages.needs.references
    on_policy = need is not None and need.on_policy and stages.score is not None
    if on_policy and not stages.needs.repeats_references:
        raise IllegalComposition(
            "on-policy queries are those of a repetition, which the other method does not run: "
            "compose match:on_policy=true with kvzip"
        )
    if stages.positions != "original":
        raise IllegalComposition(
            "a refit fits entries to queries at their positions, which the other method changes: "
            'choose positions="original"'
        )
