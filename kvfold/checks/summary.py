# SPDX-License-Identifier: Apache-2.0
"""Cells of a check from measurements of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvfold.checks.encoded import EncodedPrompt
from kvfold.checks.measure import Attack, PromptMeasurements
from kvfold.checks.reading import MethodAtBudget
from kvfold.checks.records import FULL, CheckRecord, FreeAnswer, PromptDistances
from kvfold.checks.result import AnswerLengths, CheckCell, Leakage, SpanRetention
from kvfold.evidence.estimates import LARGEST, IntervalEstimate
from kvfold.evidence.grouped import grouped
from kvfold.evidence.intervals import Array

B = TypeVar("B")
P99 = 0.99
# A KL below so many times the noise floor is noise.
NOISE = 3

# Prompts `[R, n]` by index, R resamples → statistic `[R]`
Statistic = Callable[[NDArray[np.int64]], Array]
RESAMPLES = 1000
BLOCK = 50  # resamples at a time, which bounds the memory
LIMITS = (0.025, 0.975)


def cell(
    measured: PromptMeasurements, batches: Sequence[tuple[EncodedPrompt, ...]], at: MethodAtBudget
) -> CheckCell:
    """One method at one budget over prompts, without answer lengths and leakage."""
    found: list[PromptDistances] = []
    full: list[CheckRecord] = []
    count = sum(map(len, batches))
    for batch in _told(measured, "prompts", batches, at):
        found += measured.distances(batch, at)
        full += measured.forced(batch)
    kl = [each.kl for each in found]
    mean = bootstrapped(count, mean_of(kl))
    floor = floor_of(full)
    spans, bias = retention(found, full)
    return CheckCell(
        method=at[0],
        budget=at[1],
        prompts=count,
        kept=float(np.mean([each.kept for each in found])),
        bytes_ratio=sum(each.nbytes for each in found) / sum(each.nbytes_full for each in found),
        kl=mean,
        kl_p99=bootstrapped(count, quantile_of(kl, P99)),
        kl_max=max(max(each) for each in kl),
        agreement=bootstrapped(count, mean_of([each.agrees for each in found])),
        perplexity_ratio=bootstrapped(count, exp_mean_of([each.lost for each in found])),
        first_disagreement=float(np.median([_first(each) for each in found])),
        floor=floor,
        equal=mean.value < NOISE * floor or mean.value == 0,
        spans=spans,
        bias=bias,
    )


def lengths(
    measured: PromptMeasurements, batches: Sequence[tuple[EncodedPrompt, ...]], at: MethodAtBudget
) -> AnswerLengths:
    """Lengths of free answers to prompts, beside the full cache's."""
    ours: list[FreeAnswer] = []
    full: list[FreeAnswer] = []
    count = sum(map(len, batches))
    for batch in _told(measured, "answers", batches, at):
        full += measured.answers(batch, (FULL, None))
        ours += measured.answers(batch, at)
    ratio = ratio_of([each.tokens for each in ours], [each.tokens for each in full])
    return AnswerLengths(
        prompts=count,
        ratio=bootstrapped(count, ratio),
        at_limit=float(np.mean([not each.ended for each in ours])),
        at_limit_full=float(np.mean([not each.ended for each in full])),
    )


def leakage(
    measured: PromptMeasurements, attacks: Sequence[tuple[Attack, ...]], at: MethodAtBudget
) -> dict[str, Leakage]:
    """Recall of each protected text, mean over the attacks that ask for it."""
    pairs = grouped(
        (name, (found, full[name]))
        for batch in _told(measured, "attacks", attacks, at)
        for ours, full in zip(
            measured.leaked(batch, at), measured.leaked(batch, (FULL, None)), strict=True
        )
        for name, found in ours.items()
    )
    means = {name: np.mean(each, axis=0).tolist() for name, each in pairs.items()}
    return {name: Leakage(recall=r, recall_full=f) for name, (r, f) in means.items()}


def retention(
    found: Sequence[PromptDistances], full: Sequence[CheckRecord]
) -> tuple[dict[str, SpanRetention], float | None]:
    """Retention of each span by name, and the mean bias of prompts with several spans."""
    kept: dict[str, list[float]] = {}
    effects: dict[str, list[float]] = {}
    biases = []
    for ours, theirs in zip(found, full, strict=True):
        floor = floor_of([theirs])
        for name, share in ours.spans.items():
            kept.setdefault(name, []).append(share)
            effect = (theirs.effects or {}).get(name, 0.0)
            if effect > 0 and effect >= NOISE * floor:
                left = 1 - min(1.0, float(np.mean(ours.kl)) / effect)
                effects.setdefault(name, []).append(left)
        if len(ours.spans) > 1:
            biases.append(max(ours.spans.values()) - min(ours.spans.values()))
    spans = {
        name: SpanRetention(
            kept=float(np.mean(shares)),
            effect=float(np.mean(effects[name])) if name in effects else None,
        )
        for name, shares in kept.items()
    }
    return spans, float(np.mean(biases)) if biases else None


def floor_of(full: Sequence[CheckRecord]) -> float:
    """Mean KL of the full cache read in other pieces, over all positions."""
    values = [kl for record in full if record.distances for kl in record.distances.kl]
    return float(np.mean(values))


def _first(found: PromptDistances) -> int:
    """Position of the first disagreement; the number of positions if there is none."""
    return found.agrees.index(False) if False in found.agrees else len(found.agrees)


def _told(
    measured: PromptMeasurements, what: str, batches: Sequence[tuple[B, ...]], at: MethodAtBudget
) -> Iterator[tuple[B, ...]]:
    """The batches; says before each which part of all prompts, answers or attacks it is."""
    done, count = 0, sum(map(len, batches))
    name = at[0] if at[1] is None else f"{at[0]} at {at[1]}"
    for batch in batches:
        measured.say(f"{name}: {what} {done + 1} to {done + len(batch)} of {count}")
        done += len(batch)
        yield batch


def bootstrapped(count: int, statistic: Statistic, seed: int = 0) -> IntervalEstimate:
    """`statistic` of `count` prompts, which are resampled as wholes (percentile bootstrap)."""
    drawn = np.random.default_rng(seed).integers(count, size=(RESAMPLES, count))
    value = float(statistic(np.arange(count)[None])[0])
    blocks = np.split(drawn, RESAMPLES // BLOCK)
    low, high = np.quantile(np.concatenate([*map(statistic, blocks)]), LIMITS)
    return IntervalEstimate(value, float(low), float(high))


def mean_of(values: Sequence[Sequence[float]]) -> Statistic:
    """Mean over all positions of the drawn prompts; `values[n]` are those of one prompt."""
    sums = np.array([float(np.sum(each)) for each in values])
    counts = np.array([len(each) for each in values])
    return lambda drawn: sums[drawn].sum(-1) / counts[drawn].sum(-1)


def exp_mean_of(values: Sequence[Sequence[float]]) -> Statistic:
    """exp of the mean over all positions: of lost log-likelihoods, the ratio of perplexities.

    Means above `LARGEST` nats count as that: their exp would be no number of JSON.
    """
    mean = mean_of(values)
    return lambda drawn: np.exp(np.minimum(mean(drawn), LARGEST))


def quantile_of(values: Sequence[Sequence[float]], part: float) -> Statistic:
    """Quantile over all positions of the drawn prompts."""
    grid = np.full((len(values), max(map(len, values))), np.nan)
    for row, each in zip(grid, values, strict=True):
        row[: len(each)] = each
    return lambda drawn: np.nanquantile(grid[drawn].reshape(len(drawn), -1), part, axis=-1)


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Statistic:
    """Sum over the drawn prompts of one quantity over the sum of another."""
    one, other = np.array(above, dtype=np.float64), np.array(below, dtype=np.float64)
    return lambda drawn: one[drawn].sum(-1) / other[drawn].sum(-1)
