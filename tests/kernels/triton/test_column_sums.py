# SPDX-License-Identifier: Apache-2.0
"""Triton's column sums of attention, against naive float64."""

import pytest
import torch

from kvfold.kernels.triton import (
    column_moments,
    column_sums,
)
from tests.helpers.gpu_inputs import (
    SCALE,
    asked,
    assert_close,
    attention,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter", "poison")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUPS = pytest.mark.parametrize("groups", [1, 4, 8])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


def check_columns(query, key, tolerance=2e-5, softcap=None, visible=None, counted=None):
    rows, lse = attention(query, key, softcap, visible)
    if counted is not None:
        rows = rows * counted[:, None, :, None]
    means = rows.unflatten(1, (key.shape[1], -1)).mean(2)
    given = {"scale": SCALE, "softcap": softcap, "visible": visible, "counted": counted}
    sums, squares = column_moments(query, key, lse, **given)
    assert_close(sums, means.sum(2), tolerance=tolerance)
    assert_close(squares, means.square().sum(2), tolerance=tolerance)
    assert torch.equal(column_sums(query, key, lse, **given), sums)


@pytest.mark.cases(8)
@pytest.mark.slow
@GROUPS
@DTYPES
@pytest.mark.parametrize(("queries", "stored"), [(1, 1), (63, 63), (65, 65), (5, 70), (64, 130)])
def test_column_sums(queries, stored, groups, dtype):
    check_columns(*asked(1, 2, groups, queries, stored, dtype=dtype))


@pytest.mark.parametrize("size", [40, 64, 128])
def test_column_sums_of_head_sizes(size):
    check_columns(*asked(2, 1, 2, 66, 70, size))


@pytest.mark.cases(1)
@pytest.mark.slow
@GROUPS
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_column_sums_of_padded_rows_and_counted_queries(groups, softcap):
    query, key = asked(2, 2, groups, 70, 75)
    visible = torch.ones(2, 75, dtype=torch.bool, device=DEVICE)
    visible[0, :30] = False  # the first queries of row 0 see nothing
    visible[1, 40] = False
    counted = torch.ones(2, 70, dtype=torch.bool, device=DEVICE)
    counted[0, :40] = counted[1, 66:] = False
    check_columns(query, key, softcap=softcap, visible=visible, counted=counted)
    check_columns(query, key, softcap=softcap, visible=visible)
    check_columns(query, key, softcap=softcap, counted=counted)
