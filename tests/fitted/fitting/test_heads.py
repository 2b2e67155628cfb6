# SPDX-License-Identifier: Apache-2.0
"""fit_heads: the golden area, kvpress's formula on projections that hooks read; refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import KvfoldError, fit_heads
from kvfold.fitted.file import read_scorer_file
from kvfold.fitted.fitting.heads import area
from kvfold.fitted.of_model import read_fitted
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.methods.stages.allocate.retrieval import RetrievalScores
from tests.fitted.fitting.test_scorer import texts

TOKENS, FEATURES = torch.arange(8)[:, None], torch.arange(4)
KEYS = ((7 * TOKENS + 3 * FEATURES + TOKENS * FEATURES) % 11 - 5) / 4
QUERIES = ((4 * TOKENS + 5 * FEATURES + 2 * TOKENS * FEATURES) % 9 - 4) / 4


@pytest.fixture(scope="module")
def bundled() -> Any:
    return kvfold.bundled_model()


def rotated(entries: Tensor, at: Tensor, frequencies: Tensor) -> Tensor:
    """Entries `[…, n, D]` turned to the positions `at [n]`, in pairs (j, j + D/2)."""
    angles = (at[:, None] * frequencies).repeat(1, 2)
    first, second = entries.chunk(2, -1)
    return entries * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def test_the_golden_area():
    def rotate(entries: Tensor, at: Tensor) -> Tensor:
        return rotated(entries, at[0], torch.tensor([1.0, 0.01]))

    query, key = QUERIES.mean(0)[None], KEYS.mean(0)[None]
    found = area(query, key, rotate, 0.5, 8)
    assert float(found) == pytest.approx(0.562454, abs=2e-6)


def means_by_hand(model: Any, ids: Tensor, layer: int) -> list[Tensor]:
    """Mean query `[Hq, D]` and mean key `[H, D]` before RoPE, float64."""
    attention, found = model.model.layers[layer].self_attn, []
    handles = [
        each.register_forward_hook(lambda module, given, out: found.append(out[0]))
        for each in (attention.q_proj, attention.k_proj)
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    return [each.double().mean(0).view(-1, model.config.head_dim) for each in found]


@torch.no_grad()
def scores_by_hand(model: Any, tokenizer: Any, text: str, layer: int) -> Tensor:
    """`duo_attention_on_the_fly` of kvpress for one text and layer, float64."""
    ids = token_ids(tokenizer, PromptFrame.of(tokenizer).before, text)
    query, key = means_by_hand(model, ids, layer)
    frequencies = model.model.rotary_emb.inv_freq.double()
    at = torch.arange(500)
    queries = rotated(query[:, None].expand(-1, 500, -1), at, frequencies)
    keys = rotated(key[:, None].expand(-1, 500, -1), at, frequencies).repeat_interleave(2, 0)
    logits = (keys @ queries[:, -1, :, None]).squeeze(-1) / model.config.head_dim**0.5
    return logits.softmax(-1).cumsum(1).mean(1).view(-1, 2).mean(1)


@pytest.mark.slow
def test_scores_are_those_of_kvpress(bundled, tmp_path):
    model, tokenizer = bundled
    given, lines = texts(3), []
    result = fit_heads(model, tokenizer, given, tmp_path / "a", note=lines.append)
    assert lines[-1] == "3 of 3 passages"
    scores = read_fitted(tmp_path / "a", model, RetrievalScores).heads
    assert scores.shape == (4, 4) and result.numbers == 16
    for layer in range(4):
        expected = torch.stack([scores_by_hand(*bundled, text, layer) for text in given]).mean(0)
        torch.testing.assert_close(scores[layer].double(), expected, atol=1e-4, rtol=0)


def test_the_agreement_is_what_both_halves_have_in_common(bundled, tmp_path):
    model, tokenizer = bundled
    given = texts(4)
    result = fit_heads(model, tokenizer, given, tmp_path / "whole")
    best = []
    for first in (0, 1):
        fit_heads(model, tokenizer, given[first::2], tmp_path / "half")
        scores = read_fitted(tmp_path / "half", model, RetrievalScores).heads
        best.append(set(scores.flatten().topk(8).indices.tolist()))
    assert result.agreement == len(best[0] & best[1]) / 8
    header, _ = read_scorer_file(tmp_path / "whole")
    assert (header.target, header.report) == ("duo", {"agreement": result.agreement})


def test_too_few_and_too_short_texts_are_refused(bundled, tmp_path):
    with pytest.raises(KvfoldError, match=r"1 texts are too few.*at least 2"):
        fit_heads(*bundled, texts(1), tmp_path / "a")
    with pytest.raises(KvfoldError, match="text 1 is too short to fit a scorer, 1 tokens"):
        fit_heads(*bundled, [*texts(1), "a"], tmp_path / "a")
