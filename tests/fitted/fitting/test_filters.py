# SPDX-License-Identifier: Apache-2.0
"""fit_filters: the singular vectors of numpy on queries that hooks read; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import KvfoldError, UnsupportedModel, fit_filters
from kvfold.fitted.file import read_scorer_file
from kvfold.fitted.of_model import read_fitted
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.methods.stages.score.filters import Filters
from tests.fitted.fitting.test_scorer import texts
from tests.helpers.models import build


@pytest.fixture(scope="module")
def bundled() -> Any:
    return kvfold.bundled_model()


@torch.no_grad()
def queries_by_hand(model: Any, tokenizer: Any, text: str, layer: int) -> Tensor:
    """Queries `[Hq, T, D]` after RoPE, float64, from the projection's output."""
    found = []
    projection = model.model.layers[layer].self_attn.q_proj
    handle = projection.register_forward_hook(lambda module, given, out: found.append(out[0]))
    ids = token_ids(tokenizer, PromptFrame.of(tokenizer).before, text)
    model(ids)
    handle.remove()
    size = model.config.head_dim
    queries = found[0].double().unflatten(-1, (-1, size)).transpose(0, 1)
    angles = torch.arange(ids.shape[1])[:, None] * model.model.rotary_emb.inv_freq.double()
    angles = angles.repeat(1, 2)
    first, second = queries.chunk(2, -1)
    return queries * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def test_filters_are_the_singular_vectors_of_numpy(bundled, tmp_path):
    model, tokenizer = bundled
    given, lines = texts(4), []
    result = fit_filters(model, tokenizer, given, tmp_path / "a", note=lines.append)
    assert lines[-1] == "4 of 4 passages"
    filters = read_fitted(tmp_path / "a", model, Filters).filters
    assert filters.shape == (4, 4, 32)
    layer, head, group = 2, 1, 2
    read = [queries_by_hand(model, tokenizer, text, layer) for text in given]
    directions = []
    for query_head in range(group * head, group * head + group):
        rows = torch.cat([queries[query_head] for queries in read]).numpy()
        u = np.linalg.svd(rows)[2][0]
        directions.append(u if (rows @ u).mean() > 0 else -u)
    np.testing.assert_allclose(filters[layer, head], np.mean(directions, 0), atol=1e-4)
    assert 0 < result.least_agreement <= result.agreement <= 1
    assert result.numbers == filters.numel()


def test_the_agreement_is_the_cosine_of_both_halves(bundled, tmp_path):
    model, tokenizer = bundled
    given = texts(4)
    result = fit_filters(model, tokenizer, given, tmp_path / "whole")
    halves = []
    for name in (0, 1):
        same = [given[name], given[name + 2], given[name], given[name + 2]]
        fit_filters(model, tokenizer, same, tmp_path / str(name))
        halves.append(read_fitted(tmp_path / str(name), model, Filters).filters)
    cosines = (halves[0] * halves[1]).sum(-1) / halves[0].norm(dim=-1) / halves[1].norm(dim=-1)
    assert result.agreement == pytest.approx(float(cosines.mean()), abs=1e-5)
    assert result.least_agreement == pytest.approx(float(cosines.min()), abs=1e-5)
    header, _ = read_scorer_file(tmp_path / "whole")
    assert header.report == {
        "agreement": result.agreement,
        "least_agreement": result.least_agreement,
    }
    assert (header.target, header.texts) == ("qfilter", 4)


def test_too_few_and_too_short_texts_are_refused(bundled, tmp_path):
    with pytest.raises(KvfoldError, match=r"1 texts are too few.*at least 2"):
        fit_filters(*bundled, texts(1), tmp_path / "a")
    with pytest.raises(KvfoldError, match="text 1 is too short to fit a scorer, 1 tokens"):
        fit_filters(*bundled, [*texts(1), "a"], tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_model_that_caches_latents_is_refused(bundled, tmp_path):
    with pytest.raises(UnsupportedModel, match="latents"):
        fit_filters(build("deepseek_v3"), bundled[1], texts(2), tmp_path / "a")
