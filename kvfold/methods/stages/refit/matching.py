# SPDX-License-Identifier: Apache-2.0
"""Attention matching: kept entries are refitted so that they attend as all entries did.

Zweiger et al., arXiv 2602.16284; adamzweiger/compaction `compaction/algorithms/`. The target
`whole`, the ridge towards the kept values and the hold towards weights of 1 are kvfold's own.

Letters of a KV head: T entries of the block, t kept ones, n reference queries; s `[n, T]` logits.
The block's mass is L = logsumexp(s), its output Y = softmax(s)·V; with the rest, whose mass and
output are known, it gives the whole output O at the total mass Z.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.kernels.gather import pick, take
from kvfold.kernels.partial_attention import (
    PartOutput,
    attend_to_part,
    joined_parts,
    largest_logits,
    part_logits,
)
from kvfold.methods.stages.refit.base import Compaction, Refitted
from kvfold.methods.stages.refit.least_squares import (
    largest_eigenvalue,
    nonnegative,
    ridge_towards,
)

Target = Literal["whole", "block"]
BiasPer = Literal["entry", "head", "none"]
HELD = 8  # every 8th reference token judges the fit, and takes no part in it
LONGEST = 4  # values get no longer than so many times the longest one
LEAST = 1e-12  # smallest weight; an entry with it is without effect


class Queries(NamedTuple):
    """Targets of one KV head's reference queries."""

    logits: Tensor  # [n, t], of kept entries
    block: PartOutput  # Y [n, Dv] and L [n]
    rest: PartOutput
    whole: PartOutput  # O and Z
    largest: Tensor  # [n], of each query's logits in the block

    @classmethod
    def of(
        cls, logits: Tensor, block: PartOutput, rest: PartOutput, largest: Tensor | None = None
    ) -> Queries:
        """Targets from the two parts that a query attends to; `largest` is for the target block."""
        largest = block.mass if largest is None else largest
        return cls(logits, block, rest, joined_parts([block, rest]), largest)

    def at(self, rows: Tensor) -> Queries:
        """Those where `rows [n]` is true."""
        block, rest, whole = (
            PartOutput(part.out[rows], part.mass[rows])
            for part in (self.block, self.rest, self.whole)
        )
        return Queries(self.logits[rows], block, rest, whole, self.largest[rows])

    def wrong(self, values: Tensor, bias: Tensor) -> Tensor:
        """Squared error of the whole output, of kept `values [t, Dv]` and `bias [t]`."""
        logits = self.logits + bias
        mass = logits.logsumexp(-1)
        out = (logits - mass.clamp(min=-1e30)[:, None]).exp() @ values
        now = joined_parts([PartOutput(out, mass), self.rest])
        return (now.out - self.whole.out).double().square().sum()


@dataclass(frozen=True)
class Matching:
    """A refit stage: biases by non-negative least squares of the mass, then values by ridge.

    `target`: "whole" fits the attention output with all else in view, "block" the entries' alone,
    as published. `bias`: of each entry, one number for a head's entries, or none. `ridge` draws
    values towards the kept ones, `hold` weights towards 1, both as parts of the largest eigenvalue.
    `fit_values`: False keeps the values.
    """

    target: Target
    bias: BiasPer
    fit_values: bool
    ridge: float
    hold: float

    @property
    def gives_bias(self) -> bool:
        """True if entries get a bias."""
        return self.bias != "none"

    def __call__(self, given: Compaction) -> Refitted:
        """New values and biases, KV head by KV head."""
        values, slots = take(given.values, given.slots), given.slots
        bias = torch.zeros(slots.shape, device=slots.device)
        if given.bias is not None:
            bias = pick(given.bias, slots, 0)
        report = torch.zeros(len(slots), 4, device=slots.device)
        for row in range(slots.shape[0]):
            sums = torch.zeros(3, dtype=torch.float64, device=slots.device)
            for head in range(slots.shape[1]):
                kept = slots[row, head]
                mine = (kept >= 0) & given.block[row, head][kept.clamp(min=0)]
                fitted = self._of_head(given, row, head, kept[mine])
                most = torch.finfo(values.dtype).max
                values[row, head, mine] = fitted.values.clamp(-most, most).to(values.dtype)
                bias[row, head, mine] += fitted.bias
                sums += fitted.sums
                report[row, 2] += fitted.guarded
                report[row, 3] += (fitted.bias <= torch.tensor(LEAST).log() + 1e-3).sum()
            report[row, :2] = (sums[:2] / sums[2]).sqrt().float()
        return Refitted(values, bias if self.gives_bias or given.bias is not None else None, report)

    def _of_head(self, given: Compaction, row: int, head: int, kept: Tensor) -> FittedHead:
        """The fit of one KV head's entries at slots `kept [t]`."""
        block, references = given.block[row, head], given.references
        real = references.real[row]
        keys = given.keys[row, head]
        values = given.values[row, head].to(references.queries.dtype)
        old = None if given.bias is None else given.bias[row, head]
        of_block, of_kept = (None if old is None else old[which] for which in (block, kept))
        scale, softcap = given.scale, given.softcap
        query = references.queries[row, head][real]
        rest = PartOutput(references.rest[row, head][real], references.rest_mass[row, head][real])
        whole = attend_to_part(
            query, keys[block], values[block], bias=of_block, scale=scale, softcap=softcap
        )
        largest = None
        if self.target == "block":
            largest = largest_logits(
                query, keys[block], bias=of_block, scale=scale, softcap=softcap
            )
        logits = part_logits(query, keys[kept], of_kept, scale, softcap)
        targets = Queries.of(logits, whole, rest, largest)
        token = torch.arange(len(query), device=query.device) // references.groups
        judges = token % HELD == HELD - 1
        longest = values[kept].new_zeros(1, 1) if not len(kept) else values[block]
        longest = longest.double().norm(dim=-1).amax()
        return self.fitted(targets, judges, values[kept], longest)

    def fitted(
        self, targets: Queries, judges: Tensor, values: Tensor, longest: Tensor
    ) -> FittedHead:
        """The fit of kept `values [t, Dv]` to queries, but for those of `judges [n]`.

        `longest` is the norm of the longest value of the block.
        """
        fit, held = targets.at(~judges), targets.at(judges)
        nothing = values.new_zeros(len(values))
        bias, new, guarded = nothing, values, False
        if len(values) and len(fit.logits):
            bias = self.biases(fit)
            if self.fit_values:
                new, guarded = self.values(fit, values, bias, LONGEST * longest)
        norm = held.whole.out.double().square().sum()
        sums = torch.stack([held.wrong(values, nothing), held.wrong(new, bias), norm])
        return FittedHead(new, bias, guarded, sums)

    def biases(self, fit: Queries) -> Tensor:
        """Biases `[t]` that give kept entries the block's mass; 0 without any.

        A row is the relative error of a query's mass, weighed by its mass over that of its largest
        logit, as published; with the target `whole` by what such an error does to the output, to
        first order: the block's share times ‖Y − O‖.
        """
        count = fit.logits.shape[1]
        if self.bias == "none":
            return fit.logits.new_zeros(count)
        if self.target == "whole":
            share = (fit.block.mass - fit.whole.mass).exp()
            matters = share * (fit.block.out - fit.whole.out).double().norm(dim=-1)
        else:
            matters = (fit.block.mass - fit.largest).double().exp()
        if not bool(matters.any()):  # the block's mass changes nothing
            return fit.logits.new_zeros(count)
        matters = (matters / matters.amax()).to(fit.logits.dtype)
        scaled = (fit.logits - fit.block.mass[:, None]).exp() * matters[:, None]
        if self.bias == "head":
            total = scaled.double().sum(-1)
            weight: Tensor = (total @ matters.double()) / (total @ total).clamp(min=1e-300)
            return weight.clamp(min=LEAST).log().to(fit.logits.dtype).expand(count)
        exact = scaled if self.hold >= 1e-4 and count <= 512 else scaled.double()
        normal = (exact.T @ exact).double()
        held = self.hold * largest_eigenvalue(normal)
        # In terms of what weights of 1 leave missing, which is exact where that is nothing.
        missing = (exact.T @ (matters.to(exact.dtype) - exact.sum(-1))).double()
        toward = normal.sum(-1) + held + missing
        held_normal = normal + held * torch.eye(count, dtype=normal.dtype, device=normal.device)
        return nonnegative(held_normal, toward).clamp(min=LEAST).log().to(fit.logits.dtype)

    def values(
        self, fit: Queries, kept: Tensor, bias: Tensor, bound: Tensor
    ) -> tuple[Tensor, bool]:
        """Values `[t, Dv]` by ridge towards the `kept` ones; True if the bound raised the ridge."""
        logits = fit.logits + bias
        mass = logits.logsumexp(-1)
        if self.target == "whole":
            total = torch.logaddexp(mass, fit.rest.mass)
            aim = fit.whole.out - (fit.rest.mass - total).exp()[:, None] * fit.rest.out
        else:
            total, aim = mass, fit.block.out
        shares = (logits - total[:, None]).exp()
        shares = shares if self.ridge >= 1e-4 and len(kept) <= 512 else shares.double()
        normal = (shares.T @ shares).double()
        missing = aim.to(shares.dtype) - shares @ kept.to(shares.dtype)
        toward, largest = (shares.T @ missing).double(), largest_eigenvalue(normal)
        ridge = self.ridge
        while True:
            held = ridge * largest + 1e-12
            made = ridge_towards(kept.double(), normal, toward, held)
            if made.norm(dim=-1).amax() <= bound or ridge > 1e3:
                return made.to(kept.dtype), ridge > self.ridge
            ridge = max(ridge * 10, 1e-6)


class FittedHead(NamedTuple):
    """The fit of one KV head.

    `sums`: squared errors of the held-out outputs with the entries as they were, refitted, and the
    squared norm of these outputs.
    """

    values: Tensor  # [t, Dv]
    bias: Tensor  # [t]
    guarded: bool
    sums: Tensor  # [3]
