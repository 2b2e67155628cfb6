# SPDX-License-Identifier: Apache-2.0
"""Score by the logits that a key can expect from queries at several later positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from kvfold.fitted.numbers import Fitted
from kvfold.kernels.mean_rotation import pair_norms, rotary_pairs
from kvfold.kernels.query_moments import QueryMoments
from kvfold.observers.query_moments import QueryMomentsNeed

if TYPE_CHECKING:
    from kvfold.methods.observation import Observation

Over = Literal["mean", "max"]


@dataclass(frozen=True, eq=False)
class Centres(Fitted):
    """Mean query before RoPE and mean length of each rotary pair, `[L, H, G, D]` each."""

    method: ClassVar[str] = "triattention"
    command: ClassVar[str] = "kvfold fit MODEL TEXTS --scorer triattention"
    bundled: ClassVar[str] = ""
    axes: ClassVar[dict[str, str]] = {"centres": "LHGD", "lengths": "LHGD"}
    centres: Tensor
    lengths: Tensor

    def of_layer(self, layer: int, heads: slice | None = None) -> QueryMoments:
        """Moments of one row, in one layer, of its KV heads `heads` (None: all)."""
        own = heads or slice(None)
        centres, lengths = (each[layer, own].flatten(0, 1)[None] for each in self.tensors.values())
        return QueryMoments(torch.ones(1, dtype=torch.float32), centres, moduli=lengths)


def distant_logits(observation: Observation, farthest: int, over: Over) -> Tensor:
    """Expected logits `[B, H, G, T]`, float32, without their scale; mean or maximum over distances.

    Queries are their mean before RoPE, turned to 1, 2, 4, … positions up to `farthest` after the
    last token. What the mean leaves of the length of each rotary pair, times the length of the
    key's pair, is added. The mean over distances takes one product per key.
    """
    moments = observation[QueryMomentsNeed]
    rotate, seen = observation.rotate, observation.tokens_seen
    assert moments.moduli is not None
    assert rotate is not None and seen is not None
    keys, heads = observation.keys.float(), observation.keys.shape[1]
    distances = 2 ** torch.arange(farthest.bit_length(), device=keys.device)
    centres = moments.mean[:, :, None].expand(-1, -1, len(distances), -1)
    turned = rotate(centres, seen[:, None] + distances)  # [B, Hq, distances, D]
    if over == "mean":
        turned = turned.mean(2, keepdim=True)
    pairs = rotary_pairs(rotate, keys.shape[-1], keys.device)
    left = (moments.moduli - pair_norms(moments.mean, pairs)) / pairs.sum(0)
    per_key = keys[:, :, None].transpose(-1, -2)  # [B, H, 1, D, T]
    logits: Tensor = (turned.unflatten(1, (heads, -1)) @ per_key).amax(3)
    logits += left.unflatten(1, (heads, -1)) @ pair_norms(keys, pairs).transpose(-1, -2)
    return logits


def standardized(logits: Tensor, evictable: Tensor) -> Tensor:
    """Logits `[B, H, G, T]` less their mean, over their deviation, among `evictable [B, H, T]`."""
    among = evictable[:, :, None]
    count = among.sum(-1, keepdim=True).clamp(min=1)
    apart: Tensor = logits - (logits * among).sum(-1, keepdim=True) / count
    variance = (apart.square() * among).sum(-1, keepdim=True) / count
    return apart / variance.sqrt().clamp(min=1e-6)
