# SPDX-License-Identifier: Apache-2.0
"""Attention matching: kept entries are refitted so that they attend as all entries did.

Zweiger et al., arXiv 2602.16284; adamzweiger/compaction `compaction/algorithms/`. The target
`whole`, the ridge towards the kept values and the hold towards weights of 1 are kvfold's own.

Letters of a KV head: T entries of the block, t kept ones, n reference queries; s `[n, T]` logits.
The block's mass is L = logsumexp(s), its output Y = softmax(s)·V; with the rest, whose mass and
output are known, it gives the whole output O at the total mass Z.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvfold.interruption import check_interrupted
from kvfold.kernels.gather import pick, take
from kvfold.kernels.partial_attention import (
    PartOutput,
    attend_to_part,
    joined_parts,
    largest_logits,
    part_logits,
)
from kvfold.methods.stages.refit.base import Compaction, Refitted
from kvfold.methods.stages.refit.least_squares import largest_eigenvalue, nonnegative, ridge_towards
from kvfold.observers.references import RowReferences

Target = Literal["whole", "block"]
BiasPer = Literal["entry", "head", "none"]
LONGEST = 4  # values get no longer than so many times the longest one
SAFE = 1e-4  # ridge or hold from which products in float32 are exact enough
MOST_LOGITS = 2**24  # of heads that are fitted together
LEAST = 1e-12  # smallest weight; an entry with it is without effect


class Queries(NamedTuple):
    """Targets of the reference queries of KV heads, `[H, …]`."""

    logits: Tensor  # [H, n, t], of kept entries, −∞ where a head has fewer
    block: PartOutput  # Y [H, n, Dv] and L [H, n]
    rest: PartOutput
    whole: PartOutput  # O and Z
    largest: Tensor  # [H, n], of each query's logits in the block

    @classmethod
    def of(
        cls, logits: Tensor, block: PartOutput, rest: PartOutput, largest: Tensor | None = None
    ) -> Queries:
        """Targets from the two parts that a query attends to; `largest` is for the target block."""
        largest = block.mass if largest is None else largest
        return cls(logits, block, rest, joined_parts([block, rest]), largest)

    def at(self, rows: slice) -> Queries:
        """References of some queries, as views."""
        block, rest, whole = (
            part.at(slice(None), rows) for part in (self.block, self.rest, self.whole)
        )
        return Queries(self.logits[:, rows], block, rest, whole, self.largest[:, rows])

    def wrong(self, values: Tensor, bias: Tensor) -> Tensor:
        """Squared error of the whole output, of kept `values [H, t, Dv]` and `bias [H, t]`."""
        logits = self.logits + bias[:, None]
        mass = logits.logsumexp(-1)
        out = (logits - mass.clamp(min=-1e30)[..., None]).exp() @ values
        now = joined_parts([PartOutput(out, mass), self.rest])
        return (now.out - self.whole.out).double().square().sum()


@dataclass(frozen=True)
class Matching:
    """A refit stage: biases by non-negative least squares of the mass, then values by ridge.

    `target`: "whole" fits the attention output with all else in view, "block" the entries' alone,
    as published. `bias`: of each entry, one number for a head's entries, or none. `ridge` draws
    values towards the kept ones, `hold` weights towards 1, both as parts of the largest eigenvalue.
    `fit_values`: False keeps the values. Heads that keep more than the part `up_to` of the block
    stay as they are: they cost most, and lose least.
    """

    target: Target
    bias: BiasPer
    fit_values: bool
    ridge: float
    hold: float
    up_to: float = 1.0

    @property
    def gives_bias(self) -> bool:
        """True if entries get a bias."""
        return self.bias != "none"

    def __call__(self, given: Compaction) -> Refitted:
        """New values and biases; KV heads of about as many kept entries are fitted together."""
        values, slots = take(given.values, given.slots), given.slots
        bias = torch.zeros(slots.shape, dtype=torch.float32, device=slots.device)
        if given.bias is not None:
            bias = pick(given.bias, slots, 0)
        most = torch.finfo(values.dtype).max
        report = torch.zeros(len(slots), 4, dtype=torch.float32, device=slots.device)
        for row, references in enumerate(given.references.rows()):
            mine = (slots[row] >= 0) & given.block[row].gather(1, slots[row].clamp(min=0))
            sums = torch.zeros(3, dtype=torch.float64, device=slots.device)
            for heads, queries in self._batches(references, mine, given.block[row]):
                check_interrupted()
                fitted = self._of_heads(given, row, queries, heads, mine[heads])
                found = fitted.values.clamp(-most, most).to(values.dtype)
                for head, now, added in zip(heads, found, fitted.bias, strict=True):
                    at = mine[head].nonzero()[:, 0]
                    values[row, head, at] = now[: len(at)]
                    bias[row, head, at] += added[: len(at)]
                sums += fitted.sums
                report[row, 2] += fitted.guarded
                report[row, 3] += (fitted.bias <= torch.tensor(LEAST).log() + 1e-3).sum()
            if sums[2] > 0:  # else no query judges
                report[row, :2] = (sums[:2] / sums[2]).sqrt().float()
        return Refitted(values, bias if self.gives_bias or given.bias is not None else None, report)

    def _batches(
        self, references: RowReferences, mine: Tensor, block: Tensor
    ) -> Iterator[tuple[list[int], RowReferences]]:
        """Heads that are fitted together, with their references: judges alone where none is."""
        counts = mine.sum(-1)
        dense = counts > self.up_to * block.sum(-1)
        for queries, chosen in ((references, ~dense), (references.judging(), dense)):
            for heads in _together(chosen, counts, queries.queries.shape[1]):
                yield heads, queries

    def _of_heads(
        self, given: Compaction, row: int, references: RowReferences, heads: list[int], mine: Tensor
    ) -> RefittedHeads:
        """The fit of some KV heads' entries, those of their slots where `mine [H, K]`."""
        scale, softcap, old = given.scale, given.softcap, given.bias
        # A head's own entries first.
        first = mine.sort(dim=-1, descending=True, stable=True).indices
        first = first[:, : int(mine.sum(-1).max())]
        real, kept = mine.gather(1, first), given.slots[row, heads].gather(1, first).clamp(min=0)
        queries, known = references.queries[heads], references.block
        wholes, largest, longest = [], [], []
        for head, query in zip(heads, queries, strict=True):
            block = given.block[row, head]
            keys, values = given.keys[row, head][block], given.values[row, head][block]
            beside = None if old is None else old[row, head][block]
            if known is None:
                wide = values.to(query.dtype)
                wholes.append(
                    attend_to_part(query, keys, wide, bias=beside, scale=scale, softcap=softcap)
                )
            if self.target == "block":
                found = largest_logits(query, keys, bias=beside, scale=scale, softcap=softcap)
                largest.append(found)
            norms = values.double().norm(dim=-1)
            longest.append(norms.amax() if len(norms) else norms.new_zeros(()))
        if known is None:
            whole = PartOutput(*map(torch.stack, zip(*wholes, strict=True)))
        else:
            whole = known.at(heads)
        rest = references.rest.at(heads)
        of_kept = None if old is None else old[row, heads].gather(1, kept)
        keys = given.keys[row, heads].gather(1, _wide(kept, given.keys))
        logits = part_logits(queries, keys, of_kept, scale, softcap)
        logits = logits if bool(real.all()) else logits.masked_fill(~real[:, None], -torch.inf)
        targets = Queries.of(logits, whole, rest, torch.stack(largest) if largest else None)
        values = given.values[row, heads].gather(1, _wide(kept, given.values)).to(logits.dtype)
        return self.fitted(targets, references.judges, real, values, torch.stack(longest))

    def fitted(
        self, targets: Queries, judges: int, real: Tensor, values: Tensor, longest: Tensor
    ) -> RefittedHeads:
        """The fit of kept `values [H, t, Dv]` to queries, but for the last `judges` ones.

        `real [H, t]` is False where a head has no entry; `longest [H]` are the norms of the blocks'
        longest values.
        """
        count = targets.logits.shape[1] - judges
        fit, held = targets.at(slice(count)), targets.at(slice(count, None))
        nothing = values.new_zeros(values.shape[:2])
        bias, new, guarded = nothing, values, 0
        if real.shape[1] and count:
            bias = self.biases(fit, real)
            if self.fit_values:
                new, guarded = self.values(fit, values, bias, LONGEST * longest)
        norm = held.whole.out.double().square().sum()
        sums = torch.stack([held.wrong(values, nothing), held.wrong(new, bias), norm])
        return RefittedHeads(new, bias, guarded, sums)

    def biases(self, fit: Queries, real: Tensor) -> Tensor:
        """Biases `[H, t]` that give kept entries the block's mass; 0 without any.

        A row is the relative error of a query's mass, weighed by its mass over that of its largest
        logit, as published; with the target `whole` by what such an error does to the output, to
        first order: the block's share times ‖Y − O‖.
        """
        heads, _, count = fit.logits.shape
        if self.bias == "none":
            return fit.logits.new_zeros(heads, count)
        if self.target == "whole":
            share = (fit.block.mass - fit.whole.mass).exp()
            matters = share * (fit.block.out - fit.whole.out).double().norm(dim=-1)
        else:
            matters = (fit.block.mass - fit.largest).double().exp()
        most = matters.amax(-1, keepdim=True)
        matters = (matters / most.clamp(min=1e-300)).to(fit.logits.dtype)
        scaled = (fit.logits - fit.block.mass[..., None]).exp_().mul_(matters[..., None])
        if self.bias == "head":
            total, of_mass = scaled.double().sum(-1), matters.double()
            weight = (total * of_mass).sum(-1) / total.square().sum(-1).clamp(min=1e-300)
            weights = weight[:, None].expand(heads, count)
        else:
            exact = scaled if self.hold >= SAFE else scaled.double()
            normal = (exact.mT @ exact).double()
            held = self.hold * largest_eigenvalue(normal)
            # In terms of what weights of 1 leave missing, which is exact where that is nothing.
            missing = matters.to(exact.dtype) - exact.sum(-1)
            toward = normal.sum(-1) + held[:, None]
            toward += (exact.mT @ missing[..., None]).double()[..., 0]
            normal.diagonal(dim1=-2, dim2=-1).add_(held[:, None])
            weights = nonnegative(normal, toward, real)
        without = ~real | (most == 0)  # no entry, or a mass that changes nothing
        bias: Tensor = weights.clamp(min=LEAST).log().masked_fill(without, 0)
        return bias.to(fit.logits.dtype)

    def values(self, fit: Queries, kept: Tensor, bias: Tensor, bound: Tensor) -> tuple[Tensor, int]:
        """Values `[H, t, Dv]` by ridge towards the `kept` ones; how many bounds raised the ridge.

        `bound [H]` is the largest norm of a value.
        """
        logits = fit.logits + bias[:, None]
        mass = logits.logsumexp(-1)
        if self.target == "whole":
            total = torch.logaddexp(mass, fit.rest.mass)
            aim = fit.whole.out - (fit.rest.mass - total).exp()[..., None] * fit.rest.out
        else:
            total, aim = mass, fit.block.out
        # A query that sees nothing has no share.
        shares = logits.sub_(total.clamp(min=-1e30)[..., None]).exp_()
        shares = shares if self.ridge >= SAFE else shares.double()
        normal = (shares.mT @ shares).double()
        missing = aim.to(shares.dtype) - shares @ kept.to(shares.dtype)
        toward, largest = (shares.mT @ missing).double(), largest_eigenvalue(normal)
        ridge = torch.full_like(largest, self.ridge)
        while True:
            made = ridge_towards(kept.double(), normal, toward, ridge * largest + 1e-12)
            long = (made.norm(dim=-1).amax(-1) > bound) & (ridge <= 1e3)
            if not bool(long.any()):
                return made.to(kept.dtype), int((ridge > self.ridge).sum())
            ridge = torch.where(long, (ridge * 10).clamp(min=1e-6), ridge)


class RefittedHeads(NamedTuple):
    """The fit of some KV heads.

    `sums`: squared errors of the held-out outputs with the entries as they were, refitted, and the
    squared norm of these outputs.
    """

    values: Tensor  # [H, t, Dv]
    bias: Tensor  # [H, t]
    guarded: int
    sums: Tensor  # [3]


def _together(chosen: Tensor, counts: Tensor, queries: int) -> Iterator[list[int]]:
    """Batches of the `chosen [H]` heads: of at least 3/4 as many entries as the first of them."""
    heads = chosen.nonzero()[:, 0]
    of_heads = counts[heads].sort(descending=True, stable=True)
    room, batch, most = MOST_LOGITS // max(1, queries), list[int](), 0
    for head, count in zip(heads[of_heads.indices].tolist(), of_heads.values.tolist(), strict=True):
        if batch and (4 * count < 3 * most or room < (len(batch) + 1) * most):
            yield batch
            batch = []
        most = count if not batch else most
        batch.append(head)
    if batch:
        yield batch


def _wide(slots: Tensor, entries: Tensor) -> Tensor:
    """Slots `[H, t]` as an index of `entries [B, H, T, D]`'s rows."""
    return slots[..., None].expand(-1, -1, entries.shape[-1])
