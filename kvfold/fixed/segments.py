# SPDX-License-Identifier: Apache-2.0
"""A layer whose heads hold different numbers of entries while a graph decodes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.fixed.layer import FixedLayer
from kvfold.kernels.fixed import attend_to_fixed_segments
from kvfold.layer import CompressedLayer
from kvfold.store.encoded import Flat
from kvfold.store.segments import Segments


class FixedSegments(FixedLayer):
    """Heads of different lengths: the buffers are their tails, in front of which nothing moves.

    A rectangle would give back the memory that different lengths have freed.
    """

    def __init__(self, layer: CompressedLayer, view: Segments, room: int) -> None:
        # The lengths are read on the CPU, at every step.
        super().__init__(layer, room, "cpu")
        old_keys, old_values = view.keys.encoded, view.values.encoded
        assert isinstance(old_keys, Flat) and isinstance(old_values, Flat)
        self.old_keys, self.old_values = old_keys.rows, old_values.rows
        self.lengths = torch.tensor(old_keys.lengths)
        self.alive = torch.tensor(view.keys.alive)
        self.start = self.used.clone()
        tokens = layer.logical.tokens()
        self.shown = torch.ones(layer.stored().keys.shape[0], view.new, dtype=torch.bool)
        if tokens is not None:
            self.shown[:] = tokens[:, layer.seen - view.new :]
        for rows in (self.old_keys, self.old_values):
            torch._dynamo.maybe_mark_dynamic(rows, 0)

    def _attend(
        self, query: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        out: Tensor = attend_to_fixed_segments(
            query,
            self.old_keys,
            self.old_values,
            self.lengths,
            self.keys,
            self.values,
            self.alive,
            self.shown,
            self.start,
            self.used,
            scale,
            softcap,
            sinks,
        )
        return out
