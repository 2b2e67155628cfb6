# SPDX-License-Identifier: Apache-2.0
"""Attention over parts, joined by their masses, beside one softmax over everything."""

import pytest
import torch

from kvfold.kernels import partial_attention
from kvfold.kernels.partial_attention import attend_to_part, joined_parts, largest_logits


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


QUERY, KEYS = noise(2, 3, 10, 8, seed=1), noise(2, 3, 30, 8, seed=2)
NARROW, WIDE = noise(2, 3, 30, 5, seed=3), noise(2, 3, 30, 8, seed=3)
SIZES = pytest.mark.parametrize("values", [NARROW, WIDE], ids=["narrow", "wide"])
BIAS = noise(2, 3, 30, seed=4)


def whole(values, softcap, bias, hidden):
    logits = QUERY @ KEYS.transpose(-1, -2) * 0.4
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits if bias is None else logits + bias[:, :, None]
    logits = logits.masked_fill(hidden, -torch.inf)
    return logits.softmax(-1) @ values, logits.logsumexp(-1), logits.amax(-1)


@SIZES
@pytest.mark.parametrize("tile", [1, 500, 2**23])
@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("softcap", [None, 1.2])
def test_parts_join_to_the_whole(softcap, bias, tile, values, monkeypatch):
    monkeypatch.setattr(partial_attention, "TILE", tile)
    until = torch.arange(20, 30).expand(2, 1, -1)
    columns = torch.arange(30).expand(2, 3, -1)
    parts = [
        attend_to_part(
            QUERY,
            KEYS[:, :, at],
            values[:, :, at],
            columns=columns[:, :, at],
            until=until,
            bias=None if bias is None else bias[:, :, at],
            scale=0.4,
            softcap=softcap,
        )
        for at in (slice(0, 7), slice(7, 25), slice(25, 30))
    ]
    hidden = columns[0, 0] > until[0, 0][:, None]
    out, mass, _ = whole(values, softcap, bias, hidden)
    made = joined_parts(parts)
    torch.testing.assert_close(made.out, out)
    torch.testing.assert_close(made.mass, mass)
    largest = largest_logits(QUERY, KEYS, bias=bias, scale=0.4, softcap=softcap)
    torch.testing.assert_close(largest, whole(values, softcap, bias, hidden & False)[2])


@SIZES
def test_what_nobody_sees_has_no_mass(values):
    columns, until = torch.full((2, 3, 30), 9), torch.full((2, 1, 10), 8)
    part = attend_to_part(QUERY, KEYS, values, columns=columns, until=until, scale=1.0)
    assert not part.out.any()
    assert bool((part.mass == -torch.inf).all())
    other = attend_to_part(QUERY, KEYS, values, scale=1.0)
    for both in (joined_parts([part, other]), joined_parts([other, part])):
        torch.testing.assert_close(both.out, other.out)
    assert not joined_parts([part, part]).out.any()
    assert attend_to_part(QUERY[:, :, :0], KEYS, values, scale=1.0).out.shape[:3] == (2, 3, 0)
