# SPDX-License-Identifier: Apache-2.0
"""zap_threshold: what scores enough stays, in a prompt and while answering."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvfold
from kvfold import CompressedCache, KvfoldError
from tests.helpers.caches import GREEDY, PADDED
from tests.helpers.models import continuation, prompts
from tests.helpers.scorers import random_scorer, scores_by_hand, zap_of
from tests.helpers.truth import Reader
from tests.methods.test_zap import columns, model_of

WINDOW, SINKS, THRESHOLD = 6, 2, 0.3


def spec_of(model: Any, folder: Any, **options: Any) -> str:
    file = zap_of(model, folder).removeprefix("zap:")
    given = {"threshold": THRESHOLD, "window": WINDOW, "sinks": SINKS} | options
    return "zap_threshold:" + ",".join([*(f"{k}={v}" for k, v in given.items()), file])


def stay(scores: Any, mask: Any, threshold: float = THRESHOLD) -> list[Any]:
    """Columns `[B][L][H]` that stay of scores `[L, B, H, N]`."""
    age = mask.flip(-1).cumsum(-1).flip(-1)
    place = mask.cumsum(-1) - 1
    free = ((age <= WINDOW) | (place < SINKS))[None, :, None]
    kept = ((scores >= threshold) | free) & (mask[None, :, None] > 0)
    return [
        [[head.nonzero().flatten().tolist() for head in layer[row]] for layer in kept]
        for row in range(kept.shape[1])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(64,), PADDED], ids=["alone", "padded"])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("chunk", [None, 16])
def test_a_prompt_keeps_what_a_float64_reference_keeps(tmp_path, group, lengths, chunk):
    model = model_of(group)
    ids, mask = prompts(lengths)
    expected = stay(scores_by_hand(model, ids, mask, random_scorer(model)), mask)
    sizes = {len(head) for row in expected for layer in row for head in layer}
    assert len(sizes) > 2
    cache = CompressedCache(model, spec_of(model, tmp_path))
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 1}
    kvfold.generate(model, ids, cache=cache, prefill_chunk=chunk, **options)
    assert columns(cache) == expected


@pytest.mark.slow
def test_a_token_is_judged_as_it_leaves_the_window(tmp_path):
    model = model_of(3)
    ids, _ = prompts((40,))
    reader = Reader(model, CompressedCache(model, spec_of(model, tmp_path, interval=1)))
    reader(ids)
    more = continuation(1, 12)
    for step in range(12):
        reader(more[:, step : step + 1])
        read = torch.cat([ids, more[:, : step + 1]], 1)
        whole = torch.ones_like(read)
        scores = scores_by_hand(model, read, whole, random_scorer(model))
        # The first layer's entries depend on their token alone.
        assert columns(reader.cache)[0][0] == stay(scores, whole)[0][0]


@pytest.mark.slow
def test_later_tokens_are_judged_after_each_interval(tmp_path):
    model = model_of(3)
    ids, _ = prompts((40,))
    reader = Reader(model, CompressedCache(model, spec_of(model, tmp_path, interval=4)))
    reader(ids)
    counts = []
    for token in continuation(1, 8).split(1, 1):
        reader(token)
        counts.append(sum(len(head) for head in columns(reader.cache)[0][0]))
    assert counts[2] - counts[1] == counts[1] - counts[0] > 0
    assert counts[3] < counts[2] + 2 and counts[7] < counts[6] + 2


@pytest.mark.slow
def test_thresholds_at_the_ends_keep_all_or_the_window(tmp_path):
    model = model_of(1)
    ids, _ = prompts((40,))
    for threshold, expected in ((-1e9, 40), (1e9, WINDOW + SINKS)):
        cache = CompressedCache(model, spec_of(model, tmp_path, threshold=threshold))
        kvfold.generate(model, ids, cache=cache, **GREEDY | {"max_new_tokens": 1})
        assert {len(head) for layer in columns(cache)[0] for head in layer} == {expected}


@pytest.mark.parametrize("option", ["threshold=nan", "window=-1", "sinks=-1", "interval=0"])
def test_options_out_of_range_are_refused(option):
    with pytest.raises(KvfoldError, match="zap_threshold"):
        kvfold.parse(f"zap_threshold:{option}")
