# SPDX-License-Identifier: Apache-2.0
"""A layer with a ragged store while captured steps decode."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.cache.encode import encode_due, rows_ended
from kvfold.cache.layer import CompressedLayer
from kvfold.cache.state import LayerState
from kvfold.generation.static.layer import StaticLayer
from kvfold.kernels.logits import LogitOptions
from kvfold.kernels.ragged import attend_to_room
from kvfold.store.ragged_part import uncounted


class StaticSegments(StaticLayer):
    """Segments that stay until the layer is made anew, and raw tails with room for new tokens.

    `keys` and `values [B, H, room, ·]` are the room, `used` slots of which hold new entries.
    `visible [B, 1, 1, n]` is true at those of the last n slots of the tails that hold a token.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, layer: CompressedLayer, room: int) -> None:
        super().__init__()
        state, store = layer.state, layer.state.ragged_store()
        self.room = room = steps_until_due(state, room) if encodes(state) else room
        self.stored, tokens = store.reserve(room), state.sequence.tokens()
        parts = self.stored.keys.tail, self.stored.values.tail
        self.keys, self.values = (tail[:, :, tail.shape[2] - room :] for tail in parts)
        device, (new, _) = self.keys.device, store.new
        shown = torch.zeros(len(self.keys), new + room, dtype=torch.bool, device=device)
        shown[:, :new] = True if tokens is None else tokens[:, state.seen - new :]
        self.padded = not bool(shown[:, :new].all())
        self.visible, self.to_come = shown[:, None, None], shown[:, None, None, new:]
        self.used = torch.tensor(0, device=device)
        self.seen = torch.tensor(state.seen, device=device)

    def _take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes one entry per head `[B, H, 1, D]` into the next slot."""
        slot = self.used.view(1)
        self.keys.index_copy_(2, slot, keys)
        self.values.index_copy_(2, slot, values)
        self.to_come.index_fill_(3, slot, True)
        self.used.add_(1)
        self.seen.add_(1)
        return keys, values

    def _attend(self, query: Tensor, options: LogitOptions) -> Tensor:
        mask, padded = self.visible, self.padded
        return attend_to_room(query, self.stored, mask, padded=padded, **options)

    def hand_back(self, layer: CompressedLayer) -> None:
        state, new = layer.state, int(self.used)
        layer.update(self.keys[:, :, :new], self.values[:, :, :new])
        state.sequence.note_mask(state.sequence.tokens())
        layer.leave_out_ended()
        if encodes(state):
            encode_due(state, decoding=True)

    def nbytes(self, counted: set[int]) -> int:
        held = [self.visible]
        for part in (self.stored.keys, self.stored.values, self.stored.bias):
            if part is not None:
                held += [part.tail, *(() if part.encoded is None else part.encoded.tensors())]
        return uncounted(held, counted)

    def get_seq_length(self) -> Tensor:  # type: ignore[override]
        """Columns of the logical sequence, as a tensor."""
        return self.seen.clone()


def encodes(state: LayerState) -> bool:
    """True if decode steps encode entries."""
    return state.plan.stages.encode is not None and not state.phase.frozen


def steps_until_due(state: LayerState, most: int) -> int:
    """Decode steps after which entries are to be encoded, at most `most`, at least one."""
    store, tokens = state.ragged_store(), state.sequence.tokens()
    ended = [] if tokens is None else rows_ended(tokens, store.new[0])
    for steps in range(1, most):
        if any(map(any, store.due(True, ended, steps))):
            return steps
    return max(1, most)
