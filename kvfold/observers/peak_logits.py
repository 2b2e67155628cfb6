# SPDX-License-Identifier: Apache-2.0
"""The highest logit that any query of the prompts gave each entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.observers.base import Layer, Need, Observer, filled_up, per_stored_head
from kvfold.observers.call import AttentionCall

NAME = "peak_logits"


class RunningPeaks(Observer[Tensor]):
    """Maxima `[B, H, T]` over the group and all queries that see an entry."""

    empties: ClassVar[dict[str, float]] = {NAME: 0}

    def read_piece(self, layer: Layer, call: AttentionCall) -> None:
        layer.stay()
        store, new = layer.stored(), call.query.shape[2]
        keys = call.key if store.is_dense else store.dense()[0]
        heads = keys.shape[1]
        columns = layer.columns()
        at = torch.arange(layer.seen - new, layer.seen, device=keys.device)
        real = layer.sequence.real(at.expand(len(keys), 1, -1))  # [B, 1, S], −1 for padding
        hidden = (columns[:, :, None] < 0) | (columns[:, :, None] > real[..., None])
        hidden = hidden.repeat_interleave(heads // hidden.shape[1], 1)[:, :, None]
        queries = call.query.unflatten(1, (heads, -1)).float() * call.logits["scale"]
        logits = queries @ keys.float()[:, :, None].transpose(-1, -2)
        peaks = logits.masked_fill(hidden, -torch.inf).amax((2, 3))
        peaks = per_stored_head(layer, peaks.clamp(min=torch.finfo(torch.float32).min))
        self.numbers[NAME] = torch.maximum(self.of(layer, None), peaks)

    def of(self, layer: Layer, call: AttentionCall | None) -> Tensor:
        store, peaks = layer.stored(), self.numbers.get(NAME)
        if peaks is None:
            shape, device = (*store.keys.shape[:2], store.length), store.keys.device
            lowest = torch.finfo(torch.float32).min
            return torch.full(shape, lowest, dtype=torch.float32, device=device)
        return filled_up(peaks, store.length, torch.finfo(torch.float32).min)


@dataclass(frozen=True)
class PeakLogits(Need[Tensor]):
    """`[B, H, T]`: the highest logit, before softmax, of the prompts' queries."""

    empty: ClassVar[float | None] = 0
    while_reading: ClassVar[bool] = True
    words: ClassVar[str] = "the highest logits"

    def observer(self, fitted: object = None) -> RunningPeaks:
        return RunningPeaks()
