# SPDX-License-Identifier: Apache-2.0
"""CUR: leverage of keys and values near their sum, by hand."""

from __future__ import annotations

import pytest
import torch

from kvfold.methods.cur import local_leverage
from tests.helpers.observations import observed


@pytest.mark.parametrize("left", [0, 3])
def test_cur(left: int) -> None:
    scores = local_leverage(observed(left=left), "kv_product", 4)[0, 0]
    expected = [0.197427, 0.050215, 0.078112, 0.175109, 0.122857, 0.223082, 0.083562, 0.069635]
    torch.testing.assert_close(scores[left:], torch.tensor(expected), atol=2e-6, rtol=0)
    assert not scores[:left].any()
