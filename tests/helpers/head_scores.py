# SPDX-License-Identifier: Apache-2.0
"""Random scores of several layers and heads, all different, and what the best of them are."""

import math

import torch
from hypothesis import strategies as st

NONE = -math.inf
# Few different values, so that ties are the rule.
VALUES = st.sampled_from([NONE, 0.0, 0.25, 0.5, 1.0, 2.0])


@st.composite
def layers_and_sizes(draw, layers=1):
    """Scores `[B, H, T]` of one to `layers` layers, padding on the left, and sizes per head."""
    batch = draw(st.integers(1, 3))
    scores = []
    for _ in range(draw(st.integers(1, layers))):
        heads, stored = draw(st.integers(1, 4)), draw(st.integers(1, 7))
        size = batch * heads * stored
        flat = draw(st.lists(VALUES, min_size=size, max_size=size))
        layer = torch.tensor(flat, dtype=torch.float64).view(batch, heads, stored)
        for row in range(batch):
            layer[row, :, : draw(st.integers(0, stored))] = NONE
        scores.append(layer)
    sizes = draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch))
    return scores, torch.tensor(sizes)


def distinct(*shape, seed=0):
    """Scores of which no two are equal."""
    count = math.prod(shape)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return (order.double() + 1).view(shape) / count


def candidates(heads):
    return [(score, head) for head, row in enumerate(heads) for score in row if score > NONE]


def best(found, count):
    """The `count` highest of (score, head) pairs; of equal ones the earlier head."""
    return sorted(found, key=lambda pair: (-pair[0], pair[1]))[:count]


def per_head_of(pairs, heads):
    return [sum(1 for _, head in pairs if head == h) for h in range(heads)]
