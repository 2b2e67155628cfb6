# SPDX-License-Identifier: Apache-2.0
"""Attention to buffers of fixed size is the reference where entries are visible."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvfold.kernels.reference import attend_with_column_sums
from kvfold.kernels.single_query import attend_to_buffers
from kvfold.store.buffer import GrowingBuffer


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sink_logits", [None, torch.linspace(-1, 1, 8)])
def test_attention_to_buffers_is_the_reference_where_they_are_visible(softcap, sink_logits):
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (
        torch.randn(2, heads, length, 16, generator=generator)
        for heads, length in ((8, 1), (2, 30), (2, 30))
    )
    visible = torch.rand(2, 2, 30, generator=generator) < 0.5
    options: dict[str, Any] = {"scale": 0.3, "softcap": softcap, "sink_logits": sink_logits}
    mask = visible.repeat_interleave(4, 1)[:, :, None]
    expected, _ = attend_with_column_sums(query, keys, values, mask, **options)
    for poisoned in (keys, values):
        poisoned[~visible] = 1e4
    got = attend_to_buffers(query, keys, values, visible, **options)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("room", [5, 500])
def test_room_holds_nothing_that_could_spoil_a_sum(room):
    grown = GrowingBuffer(torch.ones(1, 2, 30, 4))
    grown.reserve(0)[:, :, 30:] = torch.nan
    buffer = grown.reserve(room)
    assert buffer.shape[2] >= 30 + room and buffer.is_contiguous()
    assert buffer.sum() == 1 * 2 * 30 * 4 and torch.equal(grown.rows, buffer[:, :, :30])
