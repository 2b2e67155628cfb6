# SPDX-License-Identifier: Apache-2.0
"""D2O: sizes of layers, merged entries and moving thresholds, against loops."""

import pytest
import torch

from kvfold import CompressedCache
from tests.helpers.models import build, prompts
from tests.helpers.truth import Reader


@pytest.fixture(scope="module")
def model():
    return build("llama", torch.float64)


@pytest.mark.parametrize("part", [0.05, 0.3])
def test_d2o_as_released_says_what_it_spends_beside_its_budget(model, part):
    ids = prompts((128,))[0]
    cache = CompressedCache(model, "d2o_official:sinks=0", part)
    Reader(model, cache)(ids)
    stats = cache.stats()
    assert [layer[0][0] for layer in stats.kept[:2]] == [128, 128] == stats.kept[3][0]
    assert stats.kept[2][0][0] <= 128 * part * 1.7
    assert f"{stats.mean_kept:.1f} entries" in str(stats) and "0, 1, -1 stay whole" in str(stats)
    assert "stay whole" not in str(CompressedCache(model, "d2o_official", part).stats())
