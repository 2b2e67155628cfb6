# SPDX-License-Identifier: Apache-2.0
"""Costs of errors beside finite differences of the likelihood; models without gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvfold
from kvfold import UnsupportedModel, fit_codec
from kvfold.fitted.fitting.codec import SINKS
from kvfold.fitted.fitting.error_costs import NEAR, error_costs
from kvfold.fitted.fitting.queries import layers_read
from kvfold.hf.chat_template import PromptFrame, token_ids
from tests.fitted.fitting.test_scorer import texts
from tests.helpers.models import build
from tests.helpers.tokenizers import word_tokenizer


@torch.no_grad()
def likelihoods(model: Any, cache: DynamicCache, ids: torch.Tensor) -> torch.Tensor:
    """Log-likelihoods `[B]` of each token's likeliest successor, added up, by the first row."""
    logits = model(ids.expand(len(cache.layers[0].keys), -1), past_key_values=cache).logits
    likeliest = logits[:1].argmax(-1, keepdim=True)
    return logits.log_softmax(-1).gather(2, likeliest.expand(len(logits), -1, 1)).sum((1, 2))


@pytest.mark.slow
def test_costs_are_those_of_finite_differences(monkeypatch):
    model, tokenizer = kvfold.bundled_model()
    model = copy.deepcopy(model).double()
    monkeypatch.setattr(
        torch, "multinomial", lambda p, n, **_: p.argsort(-1, descending=True)[:, [0] * n]
    )
    text, layer, head, nudge = texts(1)[0][:150], 2, 1, 0.02
    ids = token_ids(tokenizer, PromptFrame.of(tokenizer).before, text)
    read = ids.shape[1] - ids.shape[1] // 4
    layers = list(layers_read(model, tokenizer, text))
    rotations = {each.rotation.layer: each.rotation for each in layers}
    found = error_costs(model, tokenizer, text, rotations, SINKS)
    far, size = range(SINKS, read - NEAR), layers[0].keys.shape[-1]
    assert len(far) > 4
    nudges = nudge * torch.eye(size, dtype=torch.float64)
    for side in range(2):
        slopes = []
        for token in far:
            row = nudges[:, None, None]
            if side == 0:  # errors in keys are turned as keys are
                row = rotations[layer](row, torch.full((size, 1), token))
            sums = []
            for sign in (1, -1):
                cache = DynamicCache(config=model.config)
                with torch.no_grad():
                    model(ids[:, :read], past_key_values=cache)
                cache.batch_repeat_interleave(size + 1)
                own = cache.layers[layer]
                entries = own.values if side else own.keys
                entries[1:, head, token] += sign * row[:, 0, 0]
                sums.append(likelihoods(model, cache, ids[:, read:])[1:])
            slopes.append((sums[0] - sums[1]) / (2 * nudge))
        expected = sum(torch.outer(slope, slope) for slope in slopes)
        error = (found[side, layer, head] - expected).norm() / expected.norm()
        assert error < 0.01  # transformers' norms are float32 in every model


def test_a_model_without_gradients_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match="no gradients"):
        fit_codec(build("qwen3_5"), word_tokenizer(), texts(2), tmp_path / "a")


def test_predictions_that_are_no_numbers_are_refused(tmp_path):
    model, tokenizer = kvfold.bundled_model()
    model = copy.deepcopy(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * torch.inf)
    with pytest.raises(UnsupportedModel, match=r"no numbers in torch\.float32: load"):
        fit_codec(model, tokenizer, texts(2), tmp_path / "a")
