# SPDX-License-Identifier: Apache-2.0
"""Spans of a grid are even, and their means are the whole's."""

from __future__ import annotations

import torch

from kvfold.inspect.attention_maps import cuts, means


def test_spans_are_even_and_their_means_are_the_whole_s() -> None:
    assert cuts(5, 96) == [0, 1, 2, 3, 4, 5]
    assert [b - a for a, b in zip(cuts(10, 4), cuts(10, 4)[1:], strict=False)] == [2, 3, 2, 3]
    assert means(torch.arange(10.0), 4).tolist() == [0.5, 3.0, 5.5, 8.0]
