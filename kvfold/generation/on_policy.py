# SPDX-License-Identifier: Apache-2.0
"""Reference queries of each layer, with the layers below it as they were refitted (on-policy).

Attention Matching, arXiv 2602.16284; adamzweiger/compaction `compaction/`, which reads the whole
text again for each layer. Here hidden states are kept: each layer runs twice.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.cache.cache import CompressedCache
from kvfold.cache.phase import ReconstructionForward
from kvfold.hf.decoder_layers import DecoderLayers


class _Repetition(NamedTuple):
    """A forward of S tokens after the text's N columns, up to a layer."""

    hidden: Tensor  # [B, S, hidden], that layer's input
    real: Tensor  # [B, N + S], False at padding
    positions: Tensor  # [B, S]
    repeating: ReconstructionForward


class OnPolicyReferences:
    """Forwards over a text, run layer by layer as the layers of `cache` are refitted.

    Called before a layer is refitted, it gives that layer its reference queries.
    """

    def __init__(self, layers: DecoderLayers, cache: CompressedCache) -> None:
        self._layers, self._cache = layers, cache
        self._forwards: list[_Repetition] = []
        self._reached = 0  # the layer whose input is known

    def __deepcopy__(self, memo: dict[int, Any]) -> OnPolicyReferences:
        """For a copy of the cache, whose layers are refitted otherwise; it shares hidden states."""
        other = OnPolicyReferences(self._layers, copy.deepcopy(self._cache, memo))
        other._forwards, other._reached = list(self._forwards), self._reached
        return other

    @torch.no_grad()
    def add(self, new: Tensor, real: Tensor, totals: list[int]) -> None:
        """Adds a forward of ids `new [B, S]`, of about `totals` tokens of all in each row.

        `real [B, N + S]` is 0 at padding.
        """
        positions = (real.cumsum(-1) - 1).clamp(min=0)[:, -new.shape[1] :]
        tokens = real[:, -new.shape[1] :].sum(-1).tolist()
        text = real.shape[1] - new.shape[1]
        repeating = ReconstructionForward(text, tokens, totals, scored=None)
        hidden = self._layers.embed(new)
        self._forwards.append(_Repetition(hidden, real.bool(), positions, repeating))

    @torch.no_grad()
    def __call__(self, layer: int) -> None:
        """Adds the reference queries of a layer; all below it are refitted already."""
        phase, before = self._cache.phase, self._cache.phase.frozen
        phase.freeze(True)
        try:
            for below in range(self._reached, layer):
                self._forwards = [
                    forward._replace(hidden=self._run(below, forward)) for forward in self._forwards
                ]
            self._reached = layer
            for forward in self._forwards:
                phase.repeat(forward.repeating)
                self._run(layer, forward)
        finally:
            phase.freeze(before)
            phase.repeat(None)

    def _run(self, layer: int, forward: _Repetition) -> Tensor:
        """The output of a layer, whose cache stays as it was."""
        hidden, real, positions, _ = forward
        own = self._cache.compressed_layers[layer]
        seen = own.get_seq_length()
        try:
            out = self._layers.run(layer, hidden, real, positions, self._cache)
            self._cache.binding.answered()  # by this layer alone
            return out
        finally:
            own.crop(seen - own.get_seq_length())
