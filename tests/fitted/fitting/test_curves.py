# SPDX-License-Identifier: Apache-2.0
"""fit_curve: concave hulls and greedy spending by hand, and what a curve is worth held out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import KvfoldError, fit_curve
from kvfold.fitted.file import read_scorer_file
from kvfold.fitted.fitting.curves import ROWS, hull_slopes, in_order, kept_mass, profile, ranked
from kvfold.fitted.fitting.target import scored, target_method
from kvfold.fitted.of_model import read_fitted
from kvfold.methods.base import parse
from kvfold.methods.stages.allocate.parts import Curve
from tests.fitted.fitting.test_scorer import texts

SCORE = "snapkv:window=8"


@pytest.fixture(scope="module")
def bundled() -> Any:
    return kvfold.bundled_model()


def hull_by_hand(gains: list[float]) -> list[float]:
    """Upper concave hull of the running sum at 0 … n: the highest chord over each point."""
    sums = [0.0, *itertools.accumulate(gains)]
    points = range(len(sums))
    return [
        max(
            sums[a] + (sums[b] - sums[a]) * (k - a) / (b - a) if b > a else sums[k]
            for a in points[: k + 1]
            for b in points[k:]
        )
        for k in points
    ]


def test_slopes_are_those_of_the_hull() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(10):
        gains = torch.rand(12, generator=draw).double()
        slopes = hull_slopes(gains)
        assert bool((slopes.diff() <= 1e-12).all())
        hull = torch.tensor(hull_by_hand(gains.tolist()))
        torch.testing.assert_close(slopes.cumsum(0), hull[1:].double(), atol=1e-6, rtol=0)


def test_a_budget_is_spent_where_the_slope_is_highest() -> None:
    gains = torch.tensor([[[4.0, 3, 2, 1]], [[0, 6, 0, 0]]]).double()  # slopes of the second: 3, 3
    parts = profile(gains, torch.tensor([0.25, 0.5, 0.625, 0.75]))
    assert (parts[:, :, 0] * 4).tolist() == [[2, 0], [2, 2], [3, 2], [4, 2]]


def test_every_row_of_a_profile_has_its_budget() -> None:
    gains = torch.rand(3, 2, 100, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(profile(gains).mean((1, 2)), ROWS, atol=2e-3, rtol=0)


def test_kept_mass_is_that_of_the_first_ranks() -> None:
    gains = torch.tensor([[[4.0, 3, 2, 1], [0, 6, 0, 0]]]).double()
    assert kept_mass(gains, torch.tensor([[1.0, 1.0]]), 0.5) == pytest.approx(13 / 16)
    assert kept_mass(gains, torch.tensor([[3.0, 1.0]]), 0.5) == pytest.approx(9 / 16)
    utilities, scores = torch.tensor([[[1.0, 2, 3]]]), torch.tensor([[[0.1, 0.5, 0.5]]])
    assert in_order(utilities, scores).tolist() == [[[2, 3, 1]]]


def by_hand(model: Any, tokenizer: Any, text: str, budget: float) -> Tensor:
    """Sizes `[L, H]` by adding, one by one, the head's next segment of the hull of best slope."""
    found = scored(model, tokenizer, text, target_method("kvzip"))
    ranks = ranked(model, tokenizer, text, parse(SCORE))
    layers, heads, _ = found.scores.shape
    slopes = []
    for layer, head in itertools.product(range(layers), range(heads)):
        order = ranks[layer, head, found.opening :].argsort(descending=True, stable=True)
        utility = found.scores[layer, head, found.opening :][order].double()
        slopes.append(hull_slopes(utility).tolist())
    sizes = [0] * len(slopes)
    for _ in range(round(budget * len(slopes) * len(slopes[0]))):
        following = [row[n] if n < len(row) else -1 for row, n in zip(slopes, sizes, strict=True)]
        sizes[following.index(max(following))] += 1
    return torch.tensor(sizes).view(layers, heads) / len(slopes[0])


@pytest.mark.slow
def test_a_fitted_curve_is_the_mean_of_the_texts_and_pays_held_out(bundled, tmp_path) -> None:
    model, tokenizer = bundled
    given, lines = texts(4), []
    path = tmp_path / "a.safetensors"
    result = fit_curve(model, tokenizer, given, path, score=SCORE, note=lines.append)
    assert lines[-1] == "4 of 4 passages"
    curve = read_fitted(path, model, Curve)
    assert curve.parts.shape == (99, 4, 4)
    expected = torch.stack([by_hand(model, tokenizer, text, 0.3) for text in given[:3]]).mean(0)
    torch.testing.assert_close(curve.at(0.3), expected.double(), atol=1e-3, rtol=0)
    for at, mass in result.mass.items():
        assert result.mass_of_equal[at] < mass < 1
    header, _ = read_scorer_file(path)
    assert (header.target, header.texts) == (SCORE, 4)
    assert result.numbers == curve.numbers and "equal heads" in result.report
    context = kvfold.compress(model, tokenizer, given[0], f"{SCORE} + curve:file={path}", 0.3)
    assert context.stats().kept_fraction == pytest.approx(0.3, abs=0.01)


def test_ranks_are_those_of_the_method_with_forced_entries_first(bundled) -> None:
    model, tokenizer = bundled
    text = texts(1)[0]
    ranks = ranked(model, tokenizer, text, parse(SCORE))
    context = kvfold.compress(model, tokenizer, text, SCORE, 40)
    assert bool((ranks[..., -8:] == torch.inf).all())
    for layer in range(4):
        for head, kept in enumerate(context.cache.positions(layer)[0]):
            best = ranks[layer, head].argsort(descending=True, stable=True)[:40]
            assert best.sort().values.tolist() == kept.tolist()


def test_what_cannot_be_profiled_is_refused(bundled, tmp_path) -> None:
    with pytest.raises(KvfoldError, match="texts are too few"):
        fit_curve(*bundled, texts(1), tmp_path / "a")
    for score in ("kivi", "pyramidinfer", "simlayerkv:when=first_decode"):
        with pytest.raises(KvfoldError, match="a curve is fitted for a method that scores"):
            fit_curve(*bundled, texts(2), tmp_path / "a", score=score)
