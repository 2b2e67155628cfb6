# SPDX-License-Identifier: Apache-2.0
"""Queries, keys, masks and naive column sums for kernels of attention."""

import pytest
import torch

DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["f64", "f32"]
)


def inputs(queries, stored, groups=2, dtype=torch.float64, batch=2, heads=2):
    """Query, key and value as the cache hands them out: views of buffers with poisoned slack."""
    generator = torch.Generator().manual_seed(100 * queries + stored)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    query = noise(batch, queries, heads * groups, 8).transpose(1, 2)
    key, value = noise(batch, heads, stored + 5, 8), noise(batch, heads, stored + 5, 6)
    key[:, :, stored:] = value[:, :, stored:] = torch.nan
    return query, key[:, :, :stored], value[:, :, :stored]


def causal(queries, stored):
    """Which keys each query sees, the last query all of them."""
    return torch.arange(stored) <= torch.arange(stored - queries, stored)[:, None]


def random_mask(batch, heads, queries, stored):
    """A causal mask with holes; row 0 is left-padded, so that its first queries see nothing."""
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(batch, heads, queries, stored, generator=generator) < 0.7
    mask = mask & causal(queries, stored)
    mask[0, :, :, : stored - queries + 2] = False
    return mask


def additive(mask, dtype):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)


def assert_same(got, expected, tolerance):
    for a, b in zip(got, expected, strict=True):
        assert a.isfinite().all()
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
