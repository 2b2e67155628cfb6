# SPDX-License-Identifier: Apache-2.0
"""Distance between the next-token distributions of a full and of a compressed cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Distances(NamedTuple):
    """Per position: KL divergence in nats `[S]`, same top token `[S]`, lost log-likelihood `[S]`.

    The log-likelihood is that of the forced token, ln p − ln c: positive where the compressed cache
    finds it less likely.
    """

    kl: Tensor
    agrees: Tensor
    lost: Tensor


def distances(full: Tensor, compressed: Tensor, forced: Tensor) -> Distances:
    """Distances of logits `[S, V]` at the positions that predict the `forced` tokens `[S]`.

    KL(p ‖ c) = Σ_v p_v (ln p_v − ln c_v), from log-softmax in float32. Of equal logits the lower
    token id is the top one.
    """
    ours, theirs = full.float().log_softmax(-1), compressed.float().log_softmax(-1)
    # A token that p rules out adds nothing, also where c rules it out.
    terms = torch.where(ours == -torch.inf, 0.0, ours.exp() * (ours - theirs))
    at = forced[:, None]
    lost = (ours.gather(-1, at) - theirs.gather(-1, at))[:, 0]
    return Distances(terms.sum(-1).clamp(min=0), top(full) == top(compressed), lost)


def top(logits: Tensor) -> Tensor:
    """Lowest id `[S]` of the largest of `logits [S, V]`."""
    largest = logits == logits.amax(-1, keepdim=True)
    return largest.to(torch.uint8).argmax(-1)
