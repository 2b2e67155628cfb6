# SPDX-License-Identifier: Apache-2.0
"""fit_scorer: the ridge solution of numpy on the same features; resumed, streamed, refused."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvfold
from kvfold import KvfoldError
from kvfold.fitted.file import read_scorer_file
from kvfold.fitted.fitting import scorer as fitting
from kvfold.fitted.fitting.features import Features, RidgeSums
from kvfold.fitted.fitting.scorer import BUDGETS, compare, fit_scorer, parts_of
from kvfold.fitted.fitting.target import LEAST, ScoredText, scored, target_method
from kvfold.fitted.of_model import read_fitted
from kvfold.methods.stages.score.learned import Scorer

WORDS = [
    "the",
    "quiet",
    "garden",
    "of",
    "an",
    "old",
    "house",
    "had",
    "seven",
    "gates",
    "and",
    "nobody",
    "came",
    "to",
    "open",
    "them",
]


def texts(count: int = 6, words: int = 70) -> list[str]:
    draw = random.Random(0)
    return [
        " ".join(draw.choice(WORDS) if n % 7 else str(draw.randrange(10**5)) for n in range(words))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def bundled() -> Any:
    return kvfold.bundled_model()


@pytest.fixture(scope="module")
def fitted(bundled: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("fit") / "scorer.safetensors"
    return fit_scorer(*bundled, texts(), path)


# --- the solution ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_weights_are_those_of_numpy_on_the_same_features(bundled, fitted):
    scorer = read_fitted(fitted.path, bundled[0], Scorer)
    method, learned = target_method("kvzip"), parts_of(texts())[0]
    read = [scored(*bundled, text, method) for text in learned]
    features = Features.of_first(read[0], seed=0)
    layer, head, size = 2, 1, scorer.scales.shape[-1]
    rows = [features.of_layer(text, layer)[head, :, : size + fitted.projections] for text in read]
    x = torch.cat(rows).double().numpy()
    y = np.log(np.maximum(torch.cat([r.scores[layer, head] for r in read]).double(), LEAST))
    # Ridge as least squares over further rows: √(penalty·n) of each feature but the constant one.
    added = np.eye(x.shape[1]) * np.sqrt(fitted.penalty * len(x))
    added = np.delete(added, size - 1, 0)
    expected = np.linalg.lstsq(np.vstack([x, added]), np.r_[y, np.zeros(len(added))], rcond=None)[0]
    np.testing.assert_allclose(scorer.weights[layer, head].double(), expected, atol=1e-4)


def test_the_golden_vector_of_ridge_with_a_free_intercept():
    rows = torch.tensor(
        [[((4 * i + 5 * j + 2 * i * j) % 9 - 4) / 4 for j in range(4)] for i in range(8)]
    ).double()
    x = torch.cat([rows, torch.ones(8, 1)], 1)
    y = torch.tensor([0.044756, -0.819640, -0.378161, -0.175610, -0.846098, -0.152550]).double()
    sums = RidgeSums.empty(1, 5)
    sums.add(0, x[None, :6], y[None])
    (weights,) = sums.solve(torch.arange(5), penalty=1 / 6, free=4)
    golden = torch.tensor([-0.268042, 0.214697, 0.075199, 0.012130, -0.450958]).double()
    torch.testing.assert_close(weights, golden, atol=2e-6, rtol=0)
    expected = torch.tensor([-0.534337, -0.376075]).double()
    torch.testing.assert_close(x[6:] @ weights, expected, atol=2e-6, rtol=0)


def test_sums_in_pieces_are_those_at_once():
    x, y = torch.randn(3, 50, 7), torch.randn(3, 50)
    whole, pieces = RidgeSums.empty(3, 7), RidgeSums.empty(3, 7)
    whole.add(0, x, y)
    for first in (0, 20):
        part = slice(first, 20 if first == 0 else 50)
        pieces.add(0, x[:2, part], y[:2, part])
        pieces.add(2, x[2:, part], y[2:, part])
    assert pieces.count == whole.count == 50
    chosen = torch.tensor([0, 3, 6])
    torch.testing.assert_close(pieces.solve(chosen, 0.1, 6), whole.solve(chosen, 0.1, 6))


def test_the_scorer_predicts_what_the_fit_measured(bundled, fitted):
    """The method's own scores, of rotated keys in a cache, give the report's overlap."""
    model, tokenizer = bundled
    (text,) = parts_of(texts())[2]
    read = scored(model, tokenizer, text, target_method("kvzip"))
    scorer = read_fitted(fitted.path, model, Scorer)
    size = model.config.head_dim
    keys, values = read.features[..., :size], read.features[..., size : 2 * size]
    layers = range(len(keys))
    expected = [scorer.of_layer(i)(keys[i][None], values[i][None])[0] for i in layers]
    found = compare(torch.stack(expected), read)
    assert found.overlap == pytest.approx(fitted.held_out.overlap, abs=0.01)
    assert found.loss == pytest.approx(fitted.held_out.loss, rel=1e-3)
    assert found.loss < found.loss_of_means


# --- size, resuming, the report ------------------------------------------------------------------


def test_a_scorer_is_less_than_a_hundredth_of_the_weights(fitted):
    assert 0 < fitted.share < 0.01
    assert fitted.path.stat().st_size < 8 * fitted.numbers
    header, _ = read_scorer_file(fitted.path)
    assert header.report["held_out"]["loss"] == fitted.held_out.loss
    assert (header.target.split(":")[0], header.texts) == ("kvzip", 6)


def test_a_resumed_fit_equals_one_that_was_not_stopped(bundled, fitted, tmp_path):
    path, lines = tmp_path / "scorer.safetensors", []

    def stop(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_scorer(*bundled, texts(), path, note=stop)
    assert not path.exists()
    lines.clear()
    again = fit_scorer(*bundled, texts(), path, resume=True, note=lines.append)
    assert len(lines) < 6
    assert not list(tmp_path.glob("*.partial"))
    assert again.held_out == fitted.held_out
    for name, tensor in read_scorer_file(path)[1].items():
        assert torch.equal(tensor, read_scorer_file(fitted.path)[1][name])


def test_a_fit_of_other_texts_is_not_resumed(bundled, tmp_path):
    def stop(line: str) -> None:
        if "2 of" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_scorer(*bundled, texts(), tmp_path / "a", note=stop)
    with pytest.raises(KvfoldError, match="another fit"):
        fit_scorer(*bundled, texts(5), tmp_path / "a", resume=True)
    (tmp_path / "a.partial").write_text("no tensors")
    with pytest.raises(KvfoldError, match="cannot resume"):
        fit_scorer(*bundled, texts(), tmp_path / "a", resume=True)


@pytest.mark.parametrize("damage", ["no count", "done=99", "gram"])
def test_damaged_sums_are_not_resumed(bundled, tmp_path, damage):
    def stop(line: str) -> None:
        if "2 of" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_scorer(*bundled, texts(), tmp_path / "a", note=stop)
    path = tmp_path / "a.partial"
    with safe_open(path, framework="pt") as file:
        numbers = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if damage == "gram":
        tensors["gram"][0, 0, 0] = torch.nan
    elif damage == "no count":
        del numbers["count"]
    else:
        numbers["done"] = "99"
    save_file(tensors, path, numbers)
    with pytest.raises(KvfoldError, match="cannot resume"):
        fit_scorer(*bundled, texts(), tmp_path / "a", resume=True)


def test_held_out_numbers_by_hand():
    scores = torch.tensor([9.0, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01])
    expected = torch.tensor([-9.0, 3.0, 1.0, 4.0, 2.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0])
    text = ScoredText(torch.zeros(1, 1, 11, 1), scores[None, None], opening=1)
    found = compare(expected[None, None], text)
    assert list(found.overlap) == list(BUDGETS)
    # Of ten entries the target keeps 1–5, 1–3, 1–2, 1; the scorer keeps 3, 1, 4, 2, 5.
    assert found.overlap == pytest.approx({0.5: 1, 0.3: 2 / 3, 0.2: 1 / 2, 0.1: 0})
    assert found.mass == pytest.approx({0.5: 1, 0.3: 1 / 1.2, 0.2: 0.8 / 0.9, 0.1: 0.6})
    loss = (scores[1:].log() - expected[1:]).square().mean()
    assert found.loss == pytest.approx(float(loss))


@pytest.mark.parametrize("count", [4, 5, 8, 9, 32])
def test_every_fourth_text_is_held_out_and_none_is_used_twice(count):
    whole = [str(number) for number in range(count)]
    parts = parts_of(whole)
    assert sorted(itertools.chain(*parts)) == sorted(whole)
    assert all(parts)
    assert len(parts[1]) + len(parts[2]) == max(2, count // 4)


# --- what is refused -----------------------------------------------------------------------------


def test_texts_that_are_too_short_are_refused(bundled, tmp_path):
    with pytest.raises(KvfoldError, match="text 2 is too short to fit a scorer, 1 tokens"):
        fit_scorer(*bundled, [*texts(2), "a", *texts(2)], tmp_path / "a")
    with pytest.raises(KvfoldError, match="3 texts are too few"):
        fit_scorer(*bundled, texts(3), tmp_path / "a")


@pytest.mark.parametrize("target", ["snapkv", "kvzip:level=head,head_scores=a.pt"])
def test_a_target_that_repeats_nothing_is_refused(target):
    with pytest.raises(KvfoldError, match=r"choose kvzip"):
        target_method(target)


@pytest.mark.parametrize(
    ("overlaps", "chosen"),
    [
        ({(0, 1e-4): 0.8350, (0, 1e-2): 0.8355, (64, 1e-4): 0.8370}, (0, 1e-2)),
        ({(0, 1e-4): 0.8340, (64, 1e-4): 0.8365, (256, 1e-2): 0.8370}, (64, 1e-4)),
    ],
)
def test_projections_that_gain_nothing_are_left_out(overlaps, chosen):
    assert fitting.smallest(overlaps) == chosen


def test_the_numbers_of_projections_are_those_that_fit_the_size(bundled, fitted):
    assert fitted.projections in fitting.PROJECTIONS
    assert max(fitting.PROJECTIONS) > fitted.projections  # 256 are too many for so small a model


def test_no_file_is_written_where_there_is_no_folder(bundled, tmp_path: Path):
    with pytest.raises(KvfoldError, match="cannot write"):
        fit_scorer(*bundled, texts(4), tmp_path / "none" / "a")
