# SPDX-License-Identifier: Apache-2.0
"""Long rows made short enough to be drawn: neighbours are pooled."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def cuts(tokens: int, most: int) -> list[int]:
    """Where at most `most` spans of `tokens` begin, as equal as can be, and where the last ends."""
    count = min(tokens, most)
    return [tokens * i // count for i in range(count + 1)]


def membership(tokens: int, most: int) -> Tensor:
    """Which span each token is in, one-hot `[N, C]`."""
    ends = torch.tensor(cuts(tokens, most)[1:])
    span = torch.bucketize(torch.arange(tokens), ends, right=True)
    return torch.nn.functional.one_hot(span, len(ends))


def means(values: Tensor, most: int) -> Tensor:
    """`values [N]` as means over at most `most` spans."""
    spans = [values[a:b] for a, b in pairwise(cuts(len(values), most))]
    return torch.stack([span.mean() for span in spans])
