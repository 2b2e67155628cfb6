# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM: sinks that move beside the window, and more sinks than there is room for."""

from __future__ import annotations

import pytest
import torch

import kvfold
from tests.helpers.caches import (
    ALONE,
    BATCHES,
    positions,
)
from tests.helpers.exactness import (
    against_truth,
)
from tests.helpers.models import prompts
from tests.helpers.truth import Reader, sinks_moved_up


@pytest.mark.parametrize("kind", ["reindex", "original"])
@pytest.mark.parametrize("read", [2, 10, 21, 30])
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_more_sinks_than_the_budget_or_the_text_are_all_kept(model, kind, read, ratio):
    """The first tokens stay until all sinks are there; then the newest is seen beside them."""
    sinks, total = 20, 36
    spec = f"streaming_llm:sinks={sinks},positions={kind}"
    cache = kvfold.CompressedCache(model, spec, budget=ratio)
    ids = prompts((total,))[0]
    reader = Reader(model, cache)
    reader(ids[:, :read])
    with torch.no_grad():
        for step in range(read, total):
            logits = reader(ids[:, step : step + 1])[:, -1]
            seen = sorted({*range(min(sinks, step)), step})
            assert positions(cache)[0][0][0] == [i for i in range(step + 1) if i < sinks]
            places = range(len(seen)) if kind == "reindex" else seen
            # Keys and values of sinks depend on the sinks alone: a short text is the whole truth.
            truth = model(ids[:, seen], position_ids=torch.tensor([list(places)])).logits[:, -1]
            # transformers computes RoPE's cosines in float32, by which keys are moved.
            atol = 1e-5 if kind == "reindex" else 1e-9
            torch.testing.assert_close(logits, truth, rtol=0, atol=atol)


@BATCHES
def test_streaming_llm_is_dense_with_its_sinks_rotated(lengths):
    # The model's rotation is in float32.
    off, effect, _ = against_truth(
        "llama", "streaming_llm", lengths, torch.float64, every_step=True, move=sinks_moved_up
    )
    assert off <= 2e-5
    assert effect > 1.0


def test_rotating_the_sinks_matters():
    off, _, _ = against_truth("llama", "streaming_llm", ALONE, torch.float64, every_step=True)
    assert off > 0.1


def test_rows_of_a_ratio_that_rounds_to_nothing_keep_nothing(model):
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    cache = kvfold.CompressedCache(model, "streaming_llm:sinks=0", 0.1)
    kvfold.generate(
        model, ids, cache=cache, attention_mask=(ids > 0).long(), max_new_tokens=4, do_sample=False
    )
    assert cache.stats().mean_kept == 0
