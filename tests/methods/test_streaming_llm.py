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


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reindex", "original"])
@pytest.mark.parametrize("read", [2, 10, 30])
@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_more_sinks_than_a_ratio_keep_everything(model, kind, read, ratio):
    cache = kvfold.CompressedCache(model, f"streaming_llm:sinks=20,positions={kind}", ratio)
    ids = prompts((36,))[0]
    reader = Reader(model, cache)
    read_by_steps = [reader(ids[:, :read]), *map(reader, ids[:, read:].split(1, 1))]
    assert positions(cache)[0][0][0] == list(range(36))
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(read_by_steps, 1), model(ids).logits)


@pytest.mark.slow
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


def test_rows_of_a_ratio_that_rounds_to_nothing_keep_everything(model):
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    cache = kvfold.CompressedCache(model, "streaming_llm:sinks=0", 0.1)
    kvfold.generate(
        model, ids, cache=cache, attention_mask=(ids > 0).long(), max_new_tokens=4, do_sample=False
    )
    assert [row[0] for row in cache.stats().kept[0]] == [5, 7]
