# SPDX-License-Identifier: Apache-2.0
"""Attention of one query, with its row of weights, against plain attention."""

import itertools

import pytest
import torch

from kvfold.kernels.single_query import (
    attend_beside,
    attend_single,
    attend_with_row,
    mean_of_heads,
)

SCALE = 0.4


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_row(query, key, value, seen, softcap, sink_logits):
    """Output and weights, one query head at a time; `seen [B, Hq, T]` adds to the logits."""
    out, weights = query.new_zeros(*query.shape[:2], value.shape[-1]), []
    groups = query.shape[1] // key.shape[1]
    for b, h in itertools.product(range(query.shape[0]), range(query.shape[1])):
        logits = torch.stack([SCALE * (query[b, h, 0] * k).sum() for k in key[b, h // groups]])
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        powers = (logits + seen[b, h]).exp()
        total = powers.sum() + (sink_logits[h].exp() if sink_logits is not None else 0)
        weights.append(powers / total)
        out[b, h] = sum(w * v for w, v in zip(weights[-1], value[b, h // groups], strict=True))
    return out, torch.stack(weights).view(*query.shape[:2], -1)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kind", ["none", "per row", "per head", "per query head"])
def test_a_row_is_that_of_plain_attention(groups, softcap, with_sinks, kind):
    batch, heads, stored = 2, 3, 11
    query = noise(batch, heads * groups, 1, 6, seed=1)
    key, value = noise(batch, heads, stored, 6, seed=2), noise(batch, heads, stored, 5, seed=3)
    sink_logits = noise(heads * groups, seed=4) if with_sinks else None
    by = {"per row": (1, 1), "per head": (heads, 1)}.get(kind, (heads, groups))
    hidden = noise(batch, *by, stored, seed=5) > 0.5
    hidden[..., 3] = False  # something is always seen
    added = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden, -torch.inf)
    seen = torch.zeros_like(added) if kind == "none" else added
    seen = seen.expand(batch, heads, groups, stored).flatten(1, 2)
    own = groups if kind == "per query head" else 1
    mask = None if kind == "none" else added.expand(-1, heads, own, -1).flatten(0, 1)
    out, row = attend_with_row(
        query, key, value, mask, scale=SCALE, softcap=softcap, sink_logits=sink_logits
    )
    expected, weights = naive_row(query, key, value, seen, softcap, sink_logits)
    torch.testing.assert_close(out[:, 0], expected)
    torch.testing.assert_close(row[:, :, 0], weights)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("with_holes", [False, True])
def test_beside_a_row_keys_are_multiplied_with_another_one(groups, with_sinks, with_holes):
    query, key, value = noise(2, 3 * groups, 1, 6, seed=1), noise(2, 3, 11, 6), noise(2, 3, 11, 5)
    sink_logits, slot = noise(3 * groups, seed=4) if with_sinks else None, 7
    hidden = torch.zeros(6, 1, 11, dtype=query.dtype)
    hidden[[1, 4], :, 4] = -torch.inf if with_holes else 0
    expected = attend_with_row(query, key, value, hidden, scale=SCALE, sink_logits=sink_logits)
    out, row, products = attend_beside(
        query,
        key,
        value,
        hidden if with_holes else None,
        slot,
        scale=SCALE,
        sink_logits=sink_logits,
    )
    torch.testing.assert_close((out, row), expected)
    naive = (key * key[:, :, slot : slot + 1]).sum(-1) + hidden.view(2, 3, 11)
    torch.testing.assert_close(products, naive)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_a_single_query_attends_to_everything(groups, dtype):
    query = noise(2, 3 * groups, 1, 6, seed=1)
    key, value = noise(2, 3, 11, 6, seed=2), noise(2, 3, 11, 5, seed=3)
    nothing = torch.zeros(2, 3 * groups, 11, dtype=query.dtype)
    expected, _ = naive_row(query, key, value, nothing, None, None)
    got = attend_single(query.to(dtype), key.to(dtype), value.to(dtype), SCALE)
    torch.testing.assert_close(got[:, 0], expected.to(dtype))


@pytest.mark.parametrize("groups", [1, 2])
def test_fused_attention_may_return_another_memory_layout(groups, monkeypatch):
    """Kernels of GPUs return `[B, S, H, D]` in memory."""
    fused = torch.nn.functional.scaled_dot_product_attention

    def transposed(*args, **kwargs):
        return fused(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    query, key, value = noise(2, 3 * groups, 1, 8), noise(2, 3, 9, 8), noise(2, 3, 9, 8)
    expected = attend_single(query, key, value, SCALE)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", transposed)
    torch.testing.assert_close(attend_single(query, key, value, SCALE), expected)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_means_over_heads_are_no_part_of_the_row(groups):
    """Also where each head is a group of its own: sums are added up in them."""
    row = noise(2, 6, 1, 7)
    before = row.clone()
    mean = mean_of_heads(row, groups)
    torch.testing.assert_close(mean, row[:, :, 0].unflatten(1, (groups, -1)).mean(2))
    mean.add_(1)
    assert torch.equal(row, before)
