# SPDX-License-Identifier: Apache-2.0
"""KNorm: the keys of lowest norm stay, by hand."""

from __future__ import annotations

import pytest
import torch

from kvfold import CompressedCache, KNorm, KvfoldError
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    SHAPES,
    ByHand,
    Head,
    assert_prefill,
    best,
    per_head,
)
from tests.helpers.models import build, prompts
from tests.helpers.truth import Reader


def knorm(head: Head, budget: int) -> list[int]:
    return best(-head.keys.norm(dim=-1), budget)


@SHAPES
def test_knorm_keeps_the_lowest_norms(heads, lengths):
    assert_prefill("knorm", SMALL, heads, lengths, per_head(lambda head: knorm(head, SMALL)))


def test_latents_stay_by_the_mean_norm_of_the_keys_that_are_made_of_them():
    model, other = (build("deepseek_v3", torch.float64, v_head_dim=16) for _ in range(2))
    ids, _ = prompts((64,))
    cache = CompressedCache(model, "knorm", SMALL)
    Reader(model, cache)(ids)
    for index, layer in enumerate(ByHand(other)(ids).layers):
        norms = torch.stack([head.keys.norm(dim=-1) for head in layer.heads])
        assert len(norms) == 8 and len(cache.positions(index)[0]) == 1
        assert cache.positions(index)[0][0].tolist() == sorted(best(-norms.mean(0), SMALL))


@pytest.mark.parametrize(("layers", "whole"), [("-1", [3]), ("0/-2", [0, 2]), ("3,-1", [3])])
def test_whole_layers_count_from_the_end_too(model, layers, whole):
    cache = CompressedCache(model, f"knorm:skip_layers={layers}", 40)
    Reader(model, cache)(prompts((64,))[0])
    kept = [of[0][0] for of in cache.stats().kept]
    assert [layer for layer, count in enumerate(kept) if count == 64] == whole
    assert sum(kept) == 40 * 4


@pytest.mark.parametrize("layer", [4, -5, 99])
def test_a_layer_that_there_is_not_is_refused(model, layer):
    cache = CompressedCache(model, KNorm(skip_layers=(0, layer)), 40)
    with pytest.raises(KvfoldError, match=f"knorm:skip_layers names layer {layer} of 4 compressed"):
        Reader(model, cache)(prompts((64,))[0])
