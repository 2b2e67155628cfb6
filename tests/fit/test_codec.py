# SPDX-License-Identifier: Apache-2.0
"""fit_codec: gradients by finite differences, principal directions of numpy; refusals."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import kvfold
from kvfold import KvfoldError, UnsupportedModel, fit_codec
from kvfold.codecs.basis import Basis
from kvfold.fit import codec
from kvfold.fit.gradients import gradients
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.hf.rotation import Rotation
from kvfold.hf.scorer_file import read_fitted
from tests.fit.test_fit import texts
from tests.helpers.models import build
from tests.helpers.truth import stock_cache

SINKS = codec.SINKS


@pytest.fixture(scope="module")
def bundled() -> Any:
    return kvfold.bundled_model()


def sampled(model: Any, ids: torch.Tensor, later: int) -> torch.Tensor:
    """Tokens drawn from the predictions at the last `later` tokens of `ids [1, N]`."""
    with torch.no_grad():
        likelihoods = model(ids).logits[0, -later:].float().softmax(-1)
    return torch.multinomial(likelihoods, 1, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_gradients_are_those_of_finite_differences(name):
    """Cached keys and values are moved one number at a time, and the rest of the text is read."""
    model = build(name, torch.float64)
    ids = torch.randint(3, 60, (1, 24), generator=torch.Generator().manual_seed(1))
    found = gradients(model, ids, torch.Generator().manual_seed(0))
    drawn, count = sampled(model, ids, 12), 12
    layers = [state.rotation.layer for state in kvfold.CompressedCache(model, "full").states]
    assert len(found) == len(layers)

    def likelihood(layer: int, side: str, head: int, token: int, channel: int, by: float) -> float:
        cache = stock_cache(model)
        with torch.no_grad():
            model(ids[:, :count], past_key_values=cache)
            own = cache.layers[layers[layer]]
            if side == "keys":  # moved before RoPE
                moved = torch.zeros_like(own.keys)
                moved[0, head, token, channel] = by
                own.keys = own.keys + Rotation(model, layers[layer])(moved, torch.arange(12)[None])
            else:
                own.values[0, head, token, channel] += by
            logits = model(ids[:, count:], past_key_values=cache).logits[0]
        return float(logits.log_softmax(-1).gather(-1, drawn).sum())

    for layer, given in enumerate(found):
        for side, own in (("keys", given.key_gradients), ("values", given.value_gradients)):
            at = [int(each) for each in torch.unravel_index(own.abs().argmax(), own.shape)]
            high, low = (likelihood(layer, side, *at, by) for by in (1e-3, -1e-3))
            assert (high - low) / 2e-3 == pytest.approx(float(own[tuple(at)]), rel=1e-2, abs=1e-5)


def test_directions_are_the_principal_ones_of_numpy(bundled, tmp_path):
    model, tokenizer = bundled
    given, lines = texts(4), []
    result = fit_codec(model, tokenizer, given, tmp_path / "a", note=lines.append)
    assert lines[-1] == "4 of 4 passages" and result.held_out == 1
    basis = read_fitted(tmp_path / "a", model, Basis)
    draws, before = torch.Generator().manual_seed(0), PromptFrame.of(tokenizer).before
    read = [gradients(model, token_ids(tokenizer, before, text), draws) for text in given[:3]]
    losses = []
    for name in ("key", "value"):
        rows, squares = (
            np.concatenate(
                [
                    np.stack([getattr(each, of).double().numpy() for each in layers], 0)
                    for layers in read
                ],
                2,
            )[:, :, keep]
            for of, keep in ((f"{name}s", slice(None)), (f"{name}_gradients", slice(None)))
        )
        starts = np.cumsum([0, *(layers[0].keys.shape[1] for layers in read)])[:-1]
        kept = np.setdiff1d(np.arange(rows.shape[2]), (starts[:, None] + np.arange(SINKS)).ravel())
        rows, squares = rows[:, :, kept].transpose(2, 0, 1, 3), np.square(squares[:, :, kept])
        losses.append(squares.sum(2))
        weights = getattr(basis, f"{name}_weights").double().numpy()
        means = getattr(basis, f"{name}_means").numpy()
        np.testing.assert_allclose(means, rows.mean(0), atol=1e-4)
        layers, heads, size = weights.shape
        scaled = ((rows - rows.mean(0)) * weights).reshape(len(rows), -1)
        energy = np.square(scaled @ getattr(basis, f"{name}_directions")[0].double().numpy()).sum(0)
        best = np.linalg.svd(scaled, compute_uv=False) ** 2
        np.testing.assert_allclose(np.cumsum(energy)[:50], np.cumsum(best)[:50], rtol=2e-3)
        own = getattr(basis, f"{name}_head_directions")[2, 1].double().numpy()
        one = scaled.reshape(len(rows), layers, heads, size)[:, 2, 1]
        best = np.linalg.svd(one, compute_uv=False) ** 2
        np.testing.assert_allclose(np.square(one @ own).sum(0)[:8], best[:8], rtol=1e-3)
        np.testing.assert_allclose(own.T @ own, np.eye(size), atol=1e-5)
    mean = np.mean(losses)
    for name, loss in zip(("key", "value"), losses, strict=True):
        least = 1e-3 * loss.mean(-1, keepdims=True) / mean + 1e-6
        weights = getattr(basis, f"{name}_weights").double().numpy()
        np.testing.assert_allclose(weights, np.sqrt(np.maximum(loss / mean, least)), rtol=1e-4)


def test_errors_of_equal_weight_cost_alike(bundled, tmp_path):
    """KL by noise in one layer's keys or values, each scaled by its weights, is about the same."""
    model, tokenizer = bundled
    fit_codec(model, tokenizer, texts(6), tmp_path / "a")
    basis = read_fitted(tmp_path / "a", model, Basis)
    ids = token_ids(tokenizer, PromptFrame.of(tokenizer).before, texts(7)[6])
    count, noise = ids.shape[1] // 2, torch.Generator().manual_seed(0)
    found = []
    for side, weights in (("keys", basis.key_weights), ("values", basis.value_weights)):
        for layer in range(len(weights)):
            kl = 0.0
            for _ in range(8):
                cache = stock_cache(model)
                with torch.no_grad():
                    model(ids[:, :count], past_key_values=cache)
                    expected = model(ids[:, count:], past_key_values=copy.deepcopy(cache)).logits
                    own = cache.layers[layer]
                    drawn = torch.randn(own.keys.shape, generator=noise) / weights[layer][:, None]
                    drawn[:, :, :SINKS] = 0
                    if side == "keys":
                        at = torch.arange(count)[None]
                        own.keys = own.keys + 0.02 * Rotation(model, layer)(drawn, at)
                    else:
                        own.values = own.values + 0.02 * drawn
                    logits = model(ids[:, count:], past_key_values=cache).logits
                full = expected.log_softmax(-1)
                kl += float((full.exp() * (full - logits.log_softmax(-1))).sum(-1).mean())
            found.append(kl)
    assert max(found) < 8 * min(found)


def test_layers_are_taken_in_blocks_where_they_are_many(bundled, tmp_path, monkeypatch):
    model, tokenizer = bundled
    monkeypatch.setattr(codec, "MOST_NUMBERS", 2 * 128)
    fit_codec(model, tokenizer, texts(3), tmp_path / "a")
    basis = read_fitted(tmp_path / "a", model, Basis)
    assert basis.key_directions.shape == (2, 256, 256)
    context = kvfold.compress(model, tokenizer, texts(1)[0] * 6, "full")
    context.save(tmp_path / "b", codec=f"kvtc:file={tmp_path / 'a'},ratio=2")
    loaded = kvfold.load(tmp_path / "b", model, tokenizer)
    for given, found in zip(context.cache.states, loaded.cache.states, strict=True):
        for a, b in zip(given.stored().dense(), found.stored().dense(), strict=True):
            assert (a - b).norm() < 0.1 * a.norm()


def test_equal_texts_are_held_out_by_their_number(bundled, tmp_path):
    result = fit_codec(*bundled, texts(1) * 7, tmp_path / "a")
    assert (result.texts, result.held_out) == (7, 1)


def test_what_cannot_be_fitted_is_refused(bundled, tmp_path):
    model, tokenizer = bundled
    with pytest.raises(KvfoldError, match="too few"):
        fit_codec(model, tokenizer, texts(1), tmp_path / "a")
    with pytest.raises(KvfoldError, match="text 1 is too short"):
        fit_codec(model, tokenizer, [texts(1)[0], "short"], tmp_path / "a")
    latents = build("deepseek_v3")
    with pytest.raises(UnsupportedModel, match="latents"):
        fit_codec(latents, tokenizer, texts(2), tmp_path / "a")
    assert not (tmp_path / "a").exists()
