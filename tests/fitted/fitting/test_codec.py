# SPDX-License-Identifier: Apache-2.0
"""fit_codec: the principal directions of numpy on what hooks read, and their metrics; refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kvfold
from kvfold import KvfoldError, UnsupportedModel, fit_codec
from kvfold.codecs.basis import Basis
from kvfold.fitted.fitting import codec
from kvfold.fitted.fitting.error_costs import error_costs
from kvfold.fitted.of_model import read_fitted, write_fitted
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.hf.rotation import Rotation
from tests.fitted.fitting.test_scorer import texts
from tests.helpers.models import build

SINKS = codec.SINKS


@pytest.fixture(scope="module")
def bundled() -> Any:
    return kvfold.bundled_model()


@torch.no_grad()
def read_by_hand(model: Any, tokenizer: Any, text: str) -> dict[str, np.ndarray]:
    """Outputs `[T, L, heads, D]` of the projections of keys and values, float64."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in "kv"}
    handles = []
    for layer in model.model.layers:
        for name in "kv":
            module = getattr(layer.self_attn, f"{name}_proj")
            hook = lambda module, given, out, name=name: found[name].append(out[0])  # noqa: E731
            handles.append(module.register_forward_hook(hook))
    model(token_ids(tokenizer, PromptFrame.of(tokenizer).before, text))
    for handle in handles:
        handle.remove()
    rows = {name: torch.stack(each, 1).double() for name, each in found.items()}
    return {name: r.unflatten(-1, (-1, model.config.head_dim)).numpy() for name, r in rows.items()}


def test_directions_are_the_principal_ones_of_numpy(bundled, tmp_path):
    model, tokenizer = bundled
    given, lines = texts(4), []
    result = fit_codec(model, tokenizer, given, tmp_path / "a", note=lines.append)
    assert lines[-1] == "4 of 4 passages" and result.held_out == 1
    basis = read_fitted(tmp_path / "a", model, Basis)
    read = [read_by_hand(model, tokenizer, text) for text in given[:3]]
    keys, values = (np.concatenate([each[n][SINKS:] for each in read]) for n in "kv")
    layers, heads, size = keys.shape[1:]
    rotations = {i: Rotation(model, i) for i in range(layers)}
    costs = sum(error_costs(model, tokenizer, text, rotations, SINKS) for text in given[:3])
    for own, metrics in zip(costs, (basis.key_metrics, basis.value_metrics), strict=True):
        np.testing.assert_allclose(metrics, codec._metrics(own), rtol=1e-4, atol=1e-6)
    for name, rows in (("key", keys), ("value", values)):
        metrics = getattr(basis, f"{name}_metrics").double().numpy()
        means = getattr(basis, f"{name}_means").numpy()
        np.testing.assert_allclose(means, rows.mean(0), atol=1e-4)
        scaled = np.einsum("tlhd,lhde->tlhe", rows - rows.mean(0), metrics).reshape(len(rows), -1)
        energy = np.square(scaled @ getattr(basis, f"{name}_directions")[0].double().numpy()).sum(0)
        best = np.linalg.svd(scaled, compute_uv=False) ** 2
        np.testing.assert_allclose(np.cumsum(energy)[:50], np.cumsum(best)[:50], rtol=2e-3)
        own = getattr(basis, f"{name}_head_directions")[2, 1].double().numpy()
        one = scaled.reshape(len(rows), layers, heads, size)[:, 2, 1]
        best = np.linalg.svd(one, compute_uv=False) ** 2
        np.testing.assert_allclose(np.square(one @ own).sum(0)[:8], best[:8], rtol=1e-3)
        np.testing.assert_allclose(own.T @ own, np.eye(size), atol=1e-5)


def test_metrics_are_roots_of_costs_raised_by_their_means():
    slopes = torch.randn(2, 3, 9, 4, dtype=torch.float64) * torch.tensor([1.0, 9.0]).view(
        2, 1, 1, 1
    )
    costs = slopes.mT @ slopes
    costs[1, 2] = 0  # a head that nothing attends to from afar
    found = codec._metrics(costs).numpy()
    means = np.trace(costs.numpy(), axis1=2, axis2=3) / 4
    even = means + means.mean() / 10
    expected = (costs.numpy() + even[..., None, None] * np.eye(4)) / even.mean()
    np.testing.assert_allclose(found @ found, expected, rtol=1e-9)
    np.testing.assert_allclose(found, found.swapaxes(2, 3), atol=1e-12)


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_do_not_need_the_callers(bundled, tmp_path, mode):
    with mode():
        fit_codec(*bundled, texts(2), tmp_path / "a")
    fit_codec(*bundled, texts(2), tmp_path / "b")
    found, expected = (read_fitted(tmp_path / name, bundled[0], Basis) for name in "ab")
    assert torch.equal(found.key_metrics, expected.key_metrics)


def test_a_basis_of_another_version_is_named_so(bundled, tmp_path):
    before = SimpleNamespace(tensors={"key_weights": torch.ones(4, 2, 32)})
    about = {"written_by": "0", "target": "kvtc", "texts": 2}
    write_fitted(tmp_path / "a", before, bundled[0], **about)
    with pytest.raises(KvfoldError, match="of another version of kvfold"):
        read_fitted(tmp_path / "a", bundled[0], Basis)


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
