# SPDX-License-Identifier: Apache-2.0
"""`kvfold.fit_scorer`: KVzip's scores, learned by ridge regression on the user's model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.fitted.fitting.features import PROJECTIONS, Features, RidgeSums
from kvfold.fitted.fitting.progress import Progress
from kvfold.fitted.fitting.queries import check_inputs
from kvfold.fitted.fitting.target import ScoredText, scored, target_method
from kvfold.fitted.of_model import Fit, weights_of
from kvfold.hf.arguments import checked_arguments
from kvfold.methods.base import Method
from kvfold.methods.stages.score.learned import Scorer

BUDGETS = (0.5, 0.3, 0.2, 0.1)  # parts of the entries at which both choices are compared


PENALTIES = 1e-4, 1e-2  # among which validation chooses
EQUAL = 0.002  # differences of overlaps that choose no larger scorer
LEAST_TEXTS = 4  # one to choose by, one to report on, two to learn from
MOST_OF_WEIGHTS = 0.01  # a scorer's numbers, as part of the model's weights


@dataclass(frozen=True)
class HeldOut:
    """Comparison of a scorer's choices with its target's, each one pool over layers and KV heads.

    By kept part of the entries: `overlap`, the part of the target's kept entries that the scorer
    keeps too, and `mass`, the target's scores that it keeps, as part of the most possible. `loss`
    is the mean squared error in ln of the score, `loss_of_means` that of each head's mean, which
    tells no entry from another.
    """

    overlap: dict[float, float]
    mass: dict[float, float]
    loss: float
    loss_of_means: float

    @property
    def mean_overlap(self) -> float:
        """Mean of the overlaps."""
        return sum(self.overlap.values()) / len(self.overlap)


def compare(expected: Tensor, text: ScoredText) -> HeldOut:
    """Comparison on one text, its opening left out; `expected [L, H, T]` is ln of the score."""
    own = slice(text.opening, None)
    expected, scores, targets = (x[..., own] for x in (expected, text.scores, text.targets))
    flat, pool = scores.flatten(), expected.flatten()
    ranked, wanted = pool.argsort(descending=True), flat.argsort(descending=True)
    overlap, mass = {}, {}
    for part in BUDGETS:
        count = int(part * flat.numel())
        kept = torch.zeros_like(flat, dtype=torch.bool)
        kept[ranked[:count]] = True
        overlap[part] = float(kept[wanted[:count]].float().mean())
        mass[part] = float(flat[kept].double().sum() / flat[wanted[:count]].double().sum())
    means = targets.mean(-1, keepdim=True)
    loss, of_means = (float((targets - x).square().mean()) for x in (expected, means))
    return HeldOut(overlap, mass, loss, of_means)


def mean_of(found: Sequence[HeldOut]) -> HeldOut:
    """Mean of the comparisons of several texts."""
    count = len(found)
    return HeldOut(
        {part: sum(each.overlap[part] for each in found) / count for part in BUDGETS},
        {part: sum(each.mass[part] for each in found) / count for part in BUDGETS},
        sum(each.loss for each in found) / count,
        sum(each.loss_of_means for each in found) / count,
    )


Note = Callable[[str], None]
# Weights [L, H, f] and chosen features [f], by number of projections and penalty
Candidates = dict[tuple[int, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class FitResult(Fit):
    """A fitted scorer: its file, the features and penalty chosen, and held-out measurements.

    `held_out` is of texts that neither the fit nor the choice has seen.
    """

    projections: int
    penalty: float
    held_out: HeldOut


@checked_arguments
def fit_scorer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    out: str | Path,
    *,
    target: str = "kvzip",
    seed: int = 0,
    resume: bool = False,
    note: Note = lambda line: None,
) -> FitResult:
    """Fits a scorer for `zap:file=…`: a linear model of KVzip's scores for each layer and KV head.

    Args:
        model: a causal LM of transformers.
        tokenizer: the model's.
        texts: passages of the kinds that will be compressed, about a thousand tokens each.
        out: the scorer's file.
        target: the method whose scores are learned: kvzip, or kvzip_plus.
        seed: of the random projections.
        resume: go on with the fit of the same texts that was stopped.
        note: is called with a line of progress after each text.

    Each text is read and repeated once, and then gone: sums of products are kept, and stored beside
    `out` after each text until the fit is done. Every fourth text is held out; half of these choose
    the features and the penalty, the others are reported on.

    Raises KvfoldError for fewer than four texts, for a text of less than 64 tokens or beyond the
    model's trained length, for another kind of target, if no file can be written to `out`, and if
    `resume` finds the sums of other texts; UnsupportedModel for a model whose keys cannot be
    rotated back.
    """
    method, path = target_method(target), Path(out)
    check_inputs(model, tokenizer, texts, LEAST_TEXTS, out)
    learned, choosing, reporting = parts_of(texts)
    progress = Progress.at(path, model, str(method), seed, learned, resume)
    reader = Reader(model, tokenizer, method, note)
    features, sums = _learned(reader, learned, progress, seed)
    candidates = _candidates(features, sums, int(MOST_OF_WEIGHTS * weights_of(model)))
    best = _best(reader, choosing, features, candidates)
    weights, chosen = candidates[best]
    held_out = [
        compare(features.expected(read, weights, chosen), read)
        for read in reader.read(reporting, "held out")
    ]
    projections = features.projections[:, : best[0]].contiguous()
    scorer = Scorer(weights.float(), features.scales, projections)
    held = mean_of(held_out)
    measured = {"projections": best[0], "penalty": best[1], "held_out": asdict(held)}
    also = {"held_out": held}
    result = FitResult.written(path, scorer, model, texts, str(method), measured, also, seed)
    progress.remove()
    return result


@dataclass(frozen=True)
class Reader:
    """Reads texts one by one, each of which is then gone; `note` gets a line after each."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    method: Method
    note: Note

    def read(self, texts: Sequence[str], part: str) -> Iterator[ScoredText]:
        """The scored entries of each text; `part` says what they are for."""
        for number, text in enumerate(texts, 1):
            yield scored(self.model, self.tokenizer, text, self.method)
            self.note(f"{part}: {number} of {len(texts)} passages")


def _learned(
    reader: Reader, texts: Sequence[str], progress: Progress, seed: int
) -> tuple[Features, RidgeSums]:
    """Scaled features, and the sums over all texts, those of the stored progress included."""
    features, sums = progress.features, progress.sums
    for done, text in enumerate(reader.read(texts[progress.done :], "learned"), progress.done + 1):
        features = features or Features.of_first(text, seed)
        layers, heads, size = features.scales.shape
        sums = sums or RidgeSums.empty(layers * heads, size + features.projections.shape[1])
        for layer, targets in enumerate(text.targets):
            sums.add(layer * heads, features.of_layer(text, layer), targets)
        progress.save(done, features, sums)
    assert features is not None and sums is not None
    return features, sums


def _best(
    reader: Reader, texts: Sequence[str], features: Features, candidates: Candidates
) -> tuple[int, float]:
    """The candidate that is chosen by its mean overlap on texts."""
    found: dict[tuple[int, float], list[HeldOut]] = {key: [] for key in candidates}
    for text in reader.read(texts, "choosing features"):
        for key, (weights, chosen) in candidates.items():
            found[key].append(compare(features.expected(text, weights, chosen), text))
    return smallest({key: mean_of(each).mean_overlap for key, each in found.items()})


def smallest(overlaps: Mapping[tuple[int, float], float]) -> tuple[int, float]:
    """Projections and penalty of the fewest projections, and then the largest of `overlaps`, among
    those within `EQUAL` of the best."""
    least = max(overlaps.values()) - EQUAL
    good = [key for key, overlap in overlaps.items() if overlap >= least]
    return min(good, key=lambda key: (key[0], -overlaps[key]))


def parts_of(texts: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Texts to learn from, to choose the features by, and to report on.

    Every fourth text is held out, in turn for the second and the third part; at least one for each.
    """
    held = [text for number, text in enumerate(texts) if number % 4 == 3]
    if len(held) < 2:
        return list(texts[:-2]), [texts[-2]], [texts[-1]]
    learned = [text for number, text in enumerate(texts) if number % 4 != 3]
    return learned, held[::2], held[1::2]


def _candidates(features: Features, sums: RidgeSums, most: int) -> Candidates:
    """Weights `[L, H, f]` and chosen features `[f]`, by number of projections and penalty.

    Scorers of more than `most` numbers are left out, but for those without projections.
    """
    layers, heads, size = features.scales.shape
    made = {}
    for projections, penalty in itertools.product(PROJECTIONS, PENALTIES):
        if projections and layers * heads * (2 * size + projections) + size * projections > most:
            continue
        chosen = torch.arange(size + projections)
        weights = sums.solve(chosen, penalty, free=size - 1)
        made[projections, penalty] = weights.unflatten(0, (layers, heads)), chosen
    return made
