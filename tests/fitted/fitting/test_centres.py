# SPDX-License-Identifier: Apache-2.0
"""fit_centres: means of queries that hooks read before RoPE, and how tightly they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvfold
from kvfold import KvfoldError, UnsupportedModel, fit_centres
from kvfold.fitted.file import read_scorer_file
from kvfold.fitted.of_model import read_fitted
from kvfold.hf.chat_template import PromptFrame, token_ids
from kvfold.methods.stages.score.distant_queries import Centres
from tests.fitted.fitting.test_scorer import texts
from tests.helpers.models import build


@pytest.fixture(scope="module")
def bundled() -> Any:
    return kvfold.bundled_model()


@torch.no_grad()
def queries_before_rope(model: Any, tokenizer: Any, text: str, layer: int) -> Tensor:
    """Queries `[Hq, T, D]`, float64: the projection's output."""
    found = []
    projection = model.model.layers[layer].self_attn.q_proj
    handle = projection.register_forward_hook(lambda module, given, out: found.append(out[0]))
    model(token_ids(tokenizer, PromptFrame.of(tokenizer).before, text))
    handle.remove()
    return found[0].double().unflatten(-1, (-1, model.config.head_dim)).transpose(0, 1)


def test_centres_are_the_means_of_queries_before_rope(bundled, tmp_path):
    model, tokenizer = bundled
    given, lines = texts(3), []
    result = fit_centres(model, tokenizer, given, tmp_path / "a", note=lines.append)
    assert lines[-1] == "3 of 3 passages"
    fitted = read_fitted(tmp_path / "a", model, Centres)
    assert fitted.centres.shape == fitted.lengths.shape == (4, 4, 2, 32)
    for layer in (0, 3):
        read = [queries_before_rope(model, tokenizer, text, layer) for text in given]
        queries = torch.cat(read, 1)
        pairs = torch.complex(*queries.chunk(2, -1))
        centre, length = pairs.mean(1), pairs.abs().mean(1)
        found = torch.complex(*fitted.centres[layer].flatten(0, 1).double().chunk(2, -1))
        torch.testing.assert_close(found, centre, atol=1e-5, rtol=0)
        found = fitted.lengths[layer].flatten(0, 1).double()
        torch.testing.assert_close(found, length.repeat(1, 2), atol=1e-5, rtol=0)
        concentration = (centre.abs() / length).mean(-1)
        torch.testing.assert_close(
            torch.tensor(result.concentration[layer]).double(), concentration, atol=1e-4, rtol=0
        )
    assert min(min(layer) for layer in result.concentration) > 0
    assert max(max(layer) for layer in result.concentration) <= 1
    assert result.numbers == 2 * fitted.centres.numel()
    header, _ = read_scorer_file(tmp_path / "a")
    assert header.report == {"concentration": result.concentration}
    assert (header.target, header.texts) == ("triattention", 3)


def test_too_few_and_too_short_texts_are_refused(bundled, tmp_path):
    with pytest.raises(KvfoldError, match=r"0 texts are too few.*at least 1"):
        fit_centres(*bundled, [], tmp_path / "a")
    with pytest.raises(KvfoldError, match="text 1 is too short"):
        fit_centres(*bundled, [*texts(1), "a"], tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_model_that_caches_latents_is_refused(bundled, tmp_path):
    with pytest.raises(UnsupportedModel, match="latents"):
        fit_centres(build("deepseek_v3"), bundled[1], texts(2), tmp_path / "a")
