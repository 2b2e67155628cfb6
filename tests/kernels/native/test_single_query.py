# SPDX-License-Identifier: Apache-2.0
"""Decode attention in C++ with its row of weights, against naive attention in float64."""

import pytest
import torch

from kvfold.kernels.native.library import library, operations_so_far
from kvfold.kernels.native.single_query import attend_with_row

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

SCALE = 0.3
# Rows, KV heads, query heads of each, entries, channels of keys, channels of values.
SHAPES = pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 2, 300, 32, 32),
        (2, 3, 1, 45, 64, 48),
        (1, 1, 7, 1, 16, 16),
        (2, 2, 5, 33, 10, 7),  # no whole vectors
        (1, 1, 4, 1000, 128, 96),
    ],
    ids=str,
)


def drawn(shape):
    """Queries, keys and values as a model and its buffers hold them."""
    rows, heads, groups, stored, size, value_size = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def noise(*sizes):
        return torch.randn(sizes, generator=generator)

    query = noise(rows, 1, heads * groups, size).transpose(1, 2)
    key, value = noise(rows, heads, stored + 9, size), noise(rows, heads, stored + 5, value_size)
    return query, key[:, :, :stored], value[:, :, :stored]


def holes(shape, kind):
    """Additive mask of some entries, never of the first one."""
    rows, heads, groups, stored = shape[:4]
    own = groups if kind == "per query head" else 1
    generator = torch.Generator().manual_seed(stored)
    gone = torch.rand(rows * heads, own, stored + 3, generator=generator) < 0.3
    gone[..., 0] = False
    return torch.zeros(gone.shape).masked_fill(gone, -torch.inf)[..., :stored]


def naive(query, key, value, hidden):
    """Output `[B, 1, Hq, Dv]` and weights `[B, Hq, 1, T]`, in float64."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = (each.double() for each in (query, key, value))
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    logits = SCALE * (query * key).sum(-1)
    if hidden is not None:
        of_heads = hidden.double().expand(-1, groups, -1)
        logits = logits + of_heads.reshape(logits.shape)
    powers = logits.exp()
    weights = powers / powers.sum(-1, keepdim=True)
    return (weights[..., None] * value).sum(2)[:, None], weights[:, :, None]


@SHAPES
@pytest.mark.parametrize("kind", ["none", "per head", "per query head"])
def test_output_and_weights_are_those_of_naive_attention(shape, kind):
    query, key, value = drawn(shape)
    hidden = None if kind == "none" else holes(shape, kind)
    out, row, products = attend_with_row(query, key, value, hidden, SCALE)
    assert products is None
    for got, expected in zip((out, row), naive(query, key, value, hidden), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@SHAPES
@pytest.mark.parametrize("hides", [False, True])
def test_beside_it_all_keys_are_multiplied_with_one_of_them(shape, hides):
    query, key, value = drawn(shape)
    hidden, slot = holes(shape, "per head") if hides else None, shape[3] // 2
    out, row, products = attend_with_row(query, key, value, hidden, SCALE, slot)
    alone = attend_with_row(query, key, value, hidden, SCALE)
    assert torch.equal(out, alone[0]) and torch.equal(row, alone[1])
    expected = (key.double() * key[:, :, slot : slot + 1]).sum(-1)
    if hidden is not None:
        expected = expected + hidden.view(expected.shape)
    torch.testing.assert_close(products.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_follow_one_another_are_copied():
    query, key, value = drawn((2, 3, 2, 50, 32, 32))
    apart = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (key, value)]
    wide = torch.zeros(6, 1, 100)[..., ::2]
    got = attend_with_row(query, *apart, wide, SCALE, 3)
    torch.testing.assert_close(got, attend_with_row(query, key, value, None, SCALE, 3))


def test_threads_change_nothing():
    given = drawn((2, 3, 2, 500, 32, 32))
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(attend_with_row(*given, None, SCALE)[:2])
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_a_key_that_is_nan_shows_in_all_weights():
    query, key, value = drawn((1, 2, 2, 40, 16, 16))
    key[0, 1, 7, 3] = torch.nan
    _, row, _ = attend_with_row(query, key, value, None, SCALE)
    assert row[0, 2:].isnan().all() and row[0, :2].isfinite().all()


def test_operations_are_counted():
    query, key, value = drawn((1, 2, 3, 40, 16, 8))
    before = operations_so_far()
    attend_with_row(query, key, value, None, SCALE)
    alone = operations_so_far() - before
    attend_with_row(query, key, value, None, SCALE, 5)
    assert alone == 2 * 40 * 6 * (16 + 8)
    assert operations_so_far() - before - 2 * alone == 2 * 40 * 2 * 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_default_dtype_of_the_user_changes_nothing(dtype):
    """Buffers of another width would be written beyond their ends."""
    shape = (1, 2, 2, 300, 32, 32)
    given = drawn(shape)
    out, row = naive(*given, None)
    torch.set_default_dtype(dtype)
    try:
        found = attend_with_row(*given, None, SCALE, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(each.dtype == torch.float32 for each in found)
    torch.testing.assert_close(found[0].double(), out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1].double(), row, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_mask_may_have_another_dtype(dtype):
    shape = (1, 2, 2, 300, 32, 32)
    given, hidden = drawn(shape), holes(shape, "per KV head").to(dtype)
    found = attend_with_row(*given, hidden, SCALE)
    for each, expected in zip(found[:2], naive(*given, hidden), strict=True):
        torch.testing.assert_close(each.double(), expected, rtol=1e-5, atol=1e-6)
