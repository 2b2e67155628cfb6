# SPDX-License-Identifier: Apache-2.0
"""Pooling of long rows into at most a given number of equal spans, for drawing."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def cuts(tokens: int, most: int) -> list[int]:
    """Boundaries of at most `most` near-equal spans over `tokens`: C + 1 numbers from 0 to N."""
    count = min(tokens, most)
    return [tokens * i // count for i in range(count + 1)]


def membership(tokens: int, most: int) -> Tensor:
    """One-hot span of each token, `[N, C]`."""
    ends = torch.tensor(cuts(tokens, most)[1:])
    span = torch.bucketize(torch.arange(tokens), ends, right=True)
    return torch.nn.functional.one_hot(span, len(ends))


def means(values: Tensor, most: int) -> Tensor:
    """Means `[C]` of `values [N]` over at most `most` spans."""
    spans = [values[a:b] for a, b in pairwise(cuts(len(values), most))]
    return torch.stack([span.mean() for span in spans])
