# SPDX-License-Identifier: Apache-2.0
"""Kernels: the reference against torch and a naive loop, the fast path against the reference."""

import pytest
import torch

from kvfold.kernels import column_sums as columns
from kvfold.kernels import query_blocks as chunked
from kvfold.kernels import reference
from kvfold.kernels import swapped_qk as swapped
from tests.helpers.gpu_stand_ins import flash_stand_in
from tests.helpers.kernel_inputs import additive, inputs, random_mask

KERNELS = pytest.mark.parametrize("kernel", [reference, chunked], ids=["reference", "chunked"])
GROUPS = pytest.mark.parametrize("groups", [1, 2, 4])
SCALE = 0.3


@KERNELS
@GROUPS
def test_half_precision_sums_are_held_in_float32(kernel, groups):
    query, key, value = inputs(150, 150, groups, torch.bfloat16)
    wide = [x.double() for x in (query, key, value)]
    expected = reference.attend_with_column_sums(*wide, None, scale=SCALE)
    out, sums, _ = kernel.attend_with_moments(query, key, value, None, scale=SCALE)
    assert (out.dtype, sums.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), expected[0], rtol=0.02, atol=0.02)
    torch.testing.assert_close(sums.double(), expected[1], rtol=0.02, atol=0.02)


@KERNELS
@pytest.mark.parametrize(("queries", "stored"), [(1, 1), (65, 65), (65, 130), (200, 200)])
def test_sums_add_up_to_the_queries(kernel, queries, stored):
    query, key, value = inputs(queries, stored)
    counted = torch.arange(queries).expand(2, -1) % 3 == 0
    for voters in (None, counted):
        _, sums, _ = kernel.attend_with_moments(
            query, key, value, None, scale=SCALE, counted=voters
        )
        total = queries if voters is None else int(counted[0].sum())
        expected = torch.full((2, 2), float(total), dtype=torch.float64)
        torch.testing.assert_close(sums.sum(-1), expected, rtol=0, atol=1e-10)


@KERNELS
def test_inputs_are_left_as_they_were(kernel):
    tensors = inputs(70, 80)
    mask = additive(random_mask(2, 1, 70, 80), torch.float64)
    before = [x.clone() for x in (*tensors, mask)]
    kernel.attend_with_moments(*tensors, mask, scale=SCALE, softcap=1.0)
    assert all(torch.equal(a, b) for a, b in zip((*tensors, mask), before, strict=True))


# Log-sum-exps add up, their squares do not: flash has none.
@pytest.mark.cases(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "squares"),
    [("triton", False), ("triton", True), ("flash", False), ("torch", False), ("torch", True)],
)
@pytest.mark.parametrize("queries", [40, 12])
@pytest.mark.usefixtures("interpreted")
def test_every_path_to_column_sums_gives_the_same(queries, path, squares, monkeypatch):
    """Torch's GPU kernel with a stand-in, Triton interpreted."""
    monkeypatch.setattr(columns, "columns_path", lambda *_, **__: path)
    monkeypatch.setattr(swapped, "flash", flash_stand_in)
    dtype = torch.float32 if path == "torch" else torch.float16
    noise = torch.Generator().manual_seed(0)
    query = torch.randn(2, 8, queries, 16, generator=noise).to(dtype)
    key, value = torch.randn(2, 2, 2, 40, 16, generator=noise).to(dtype)
    counted = torch.arange(queries).expand(2, -1) > torch.tensor([[3], [0]])
    got = columns.attend_with_moments(
        query, key, value, None, scale=0.25, counted=counted, squares=squares
    )
    expected = reference.attend_with_moments(
        query.double(), key.double(), value.double(), None, scale=0.25, counted=counted
    )
    assert (got[2] is None) != squares
    for one, other in zip(got[: 2 + squares], expected, strict=False):
        torch.testing.assert_close(one.double(), other, rtol=3e-3, atol=3e-3)
