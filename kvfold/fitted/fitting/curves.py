# SPDX-License-Identifier: Apache-2.0
"""`kvfold.fit_curve`: sizes of KV heads by the utility of a score's choices, for `curve`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache.cache import CompressedCache
from kvfold.errors import KvfoldError
from kvfold.fitted.fitting.queries import check_inputs, noted
from kvfold.fitted.fitting.target import scored, target_method
from kvfold.fitted.of_model import Fit
from kvfold.generation.reading import read_on
from kvfold.hf.arguments import checked_arguments
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.methods.base import Method, parse
from kvfold.methods.stages.allocate.parts import Curve, proportional_within
from kvfold.methods.stages.select.top import with_forced
from kvfold.methods.stages.when import Once

LEAST_TEXTS = 2  # one to profile, one to report on
PUBLISHED = "expected_attention:epsilon=0.02"  # score of LU-KV
ROWS = torch.arange(1, 100, dtype=torch.float64) / 100  # budgets of a curve
REPORTED = (0.5, 0.3, 0.2, 0.1)


@dataclass(frozen=True)
class CurveFit(Fit):
    """A fitted curve: its file, and the utility that it keeps on held-out texts.

    `mass` is the utility that the score's choices keep with the curve's sizes, as part of all,
    and `mass_of_equal` that with equal sizes, by kept part.
    """

    score: str
    mass: dict[float, float]
    mass_of_equal: dict[float, float]

    @property
    def report(self) -> str:
        """The fit's measurements, in words."""
        each = [
            f"{part:.0%}: {mass:.1%} ({self.mass_of_equal[part]:.1%})"
            for part, mass in self.mass.items()
        ]
        return (
            f"KVzip's score that {self.score} keeps on held-out passages, in parentheses with "
            f"equal heads; kept {', '.join(each)}"
        )


@checked_arguments
def fit_curve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    out: str | Path,
    *,
    score: str = PUBLISHED,
    note: Callable[[str], None] = lambda line: None,
) -> CurveFit:
    """Fits the sizes of `curve:file=…`, a part for each budget, layer and KV head.

    An entry's utility is KVzip's score; the method `score` ranks the entries, forced ones first.
    Each head's utilities are summed up in that order, and the budget goes to the heads by the
    slopes of the sums' upper concave hulls. The parts are means over the texts, without every
    fourth, which is held out. Each text is read twice and repeated once; `note` is called with a
    line of progress after each.

    Raises KvfoldError for fewer than two texts, for a text of less than 64 tokens or beyond the
    model's trained length, for a method that scores nothing, and if no file can be written to
    `out`.
    Source: LU-KV, section 4 (arXiv 2602.08585), with one total over all layers and heads.
    """
    method, utility = ranking_method(score), target_method("kvzip")
    check_inputs(model, tokenizer, texts, LEAST_TEXTS, out)
    held = [number for number in range(len(texts)) if number % 4 == 3] or [len(texts) - 1]
    parts: list[Tensor] = []
    unseen: list[Tensor] = []
    for number, text in enumerate(noted(texts, note)):
        found = scored(model, tokenizer, text, utility)
        own = slice(found.opening, None)
        gains = in_order(found.scores[..., own], ranked(model, tokenizer, text, method)[..., own])
        if number in held:
            unseen.append(gains)
        else:
            parts.append(profile(gains))
    curve = Curve(ROWS.float(), torch.stack(parts).mean(0).float())
    mass, of_equal = (dict.fromkeys(REPORTED, 0.0) for _ in range(2))
    for gains in unseen:
        for at in REPORTED:
            mass[at] += kept_mass(gains, curve.at(at), at) / len(unseen)
            of_equal[at] += kept_mass(gains, torch.ones_like(curve.at(at)), at) / len(unseen)
    measured = {"mass": mass, "mass_of_equal": of_equal}
    return CurveFit.written(out, curve, model, texts, score, measured, {"score": score})


def ranking_method(score: str) -> Method:
    """The method of a text; raises KvfoldError unless it scores entries when a prompt ends."""
    method = parse(score)
    stages = method.stages()
    later = isinstance(stages.when, Once)
    if stages.score is None or stages.token_pruning is not None or later:
        raise KvfoldError(
            f"a curve is fitted for a method that scores a prompt's entries, and {method} does "
            "not: choose one such as snapkv or expected_attention"
        )
    return method


@torch.no_grad()
def ranked(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, method: Method
) -> Tensor:
    """Scores `[L, H, T]` that a method gives a text's entries, +∞ to forced ones."""
    ids = token_ids(tokenizer, PromptFrame.of(tokenizer).before, text).to(model.device)
    cache = CompressedCache(model, method, 1.0, tokenizer=tokenizer)
    for state in cache.states:
        state.adopt(replace(state.plan, keep_scores=True))
    with cache.reading():
        read_on(model, cache, ids)
    found = []
    for state in cache.states:
        positions = state.positions()
        forced = state.plan.stages.forced.mask(positions, state.seen_per_row())
        scores = state.observers.kept.scores
        assert scores is not None
        found.append(with_forced(scores, forced, positions)[0].to(model.device))
    return torch.stack(found)


def in_order(utilities: Tensor, scores: Tensor) -> Tensor:
    """Utilities `[L, H, T]`, float64, by descending score; of equal scores the earlier first."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return utilities.double().gather(-1, order).cpu()


def profile(gains: Tensor, budgets: Tensor = ROWS) -> Tensor:
    """Parts `[R, L, H]` that the heads get at `budgets [R]`, by `gains [L, H, T]` in their order.

    The slopes of all hulls are ranked together, of equal ones the earlier head's first.
    """
    tokens = gains.shape[-1]
    slopes = torch.stack([hull_slopes(head) for head in gains.flatten(0, 1)])
    order = slopes.flatten().argsort(descending=True, stable=True) // tokens
    rows = []
    for budget in budgets.tolist():
        spent = order[: round(budget * slopes.numel())]
        rows.append(spent.bincount(minlength=len(slopes)) / tokens)
    by_head: Tensor = torch.stack(rows).double().unflatten(1, gains.shape[:2])
    return by_head


def hull_slopes(gains: Tensor) -> Tensor:
    """Slopes `[T]`, descending, of the upper concave hull of the running sum of `gains [T]`.

    Neighbours that would ascend are pooled into their mean.
    """
    means: list[float] = []
    sizes: list[int] = []
    for gain in gains.tolist():
        mean, size = gain, 1
        while means and means[-1] < mean:
            before = sizes.pop()
            mean = (mean * size + means.pop() * before) / (size + before)
            size += before
        means.append(mean)
        sizes.append(size)
    return torch.tensor(means, dtype=torch.float64).repeat_interleave(torch.tensor(sizes))


def kept_mass(gains: Tensor, parts: Tensor, budget: float) -> float:
    """Part of all utility in the best-ranked entries, with sizes in proportion to `parts [L, H]`.

    `gains [L, H, T]` are in the score's order.
    """
    heads, tokens = gains.flatten(0, 1), gains.shape[-1]
    least, most = torch.zeros(len(heads)).double(), torch.full((len(heads),), tokens).double()
    weights = parts.flatten().double()
    sizes = proportional_within(weights, int(budget * heads.numel()), least, most)
    kept = torch.arange(tokens) < torch.tensor(sizes)[:, None]
    return float(heads[kept].sum() / heads.sum())
