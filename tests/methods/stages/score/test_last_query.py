# SPDX-License-Identifier: Apache-2.0
"""The newest query's attention as a score, against naive attention in float64."""

import pytest
import torch

from kvfold.methods.tova import newest_row
from tests.helpers.observations import alone, mean_of_groups, naive_rows, observe

GROUPS = pytest.mark.parametrize("groups", [1, 2, 4])
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@GROUPS
def test_the_newest_row_is_the_last_query_s_attention(groups):
    seen = observe([25], groups=groups, window=4)
    row = naive_rows(seen)[:, -1]
    per_head = mean_of_groups(row, groups)
    torch.testing.assert_close(newest_row(seen, per_head=True)[0], per_head.float(), **CLOSE)
    shared = (row.sum(0) / len(row)).expand(2, -1)
    torch.testing.assert_close(newest_row(seen, per_head=False)[0], shared.float(), **CLOSE)


@pytest.mark.parametrize("per_head", [False, True])
def test_the_newest_row_of_a_padded_row_is_its_own(per_head):
    lengths = [25, 11, 1]
    seen = observe(lengths)
    rows = newest_row(seen, per_head)
    for row, length in enumerate(lengths):
        by_itself = newest_row(alone(seen, row, length), per_head)
        torch.testing.assert_close(rows[row, :, -length:], by_itself[0], **CLOSE)
        assert rows[row, :, : 25 - length].eq(0).all()
