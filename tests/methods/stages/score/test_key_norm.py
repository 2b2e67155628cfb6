# SPDX-License-Identifier: Apache-2.0
"""Key norms as a score, computed in float32."""

import math

import pytest
import torch

from kvfold.methods.knorm import negative_norm
from kvfold.methods.observation import Observation
from tests.helpers.observations import observe


def test_a_key_scores_minus_its_length():
    seen = observe([12, 7])
    for row, head, slot in [(0, 0, 0), (0, 1, 11), (1, 0, 6), (1, 1, 2)]:
        length = math.sqrt(sum(x * x for x in seen.keys[row, head, slot].tolist()))
        assert negative_norm(seen)[row, head, slot].item() == pytest.approx(-length, rel=1e-6)


def test_key_lengths_are_computed_in_float32():
    keys = torch.full((1, 1, 1, 4), 40_000.0, dtype=torch.float16)
    seen = Observation(keys, keys, torch.zeros(1, 1, 1, dtype=torch.long))
    assert negative_norm(seen).item() == pytest.approx(-80_000, rel=1e-3)
