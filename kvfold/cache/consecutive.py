# SPDX-License-Identifier: Apache-2.0
"""Consecutive positions: kept keys move up, so that a head's entries end before the next token.

Finch and kvpress's KeyRerotationPress number kept tokens from 0, and the next token after them.
Moving the kept keys up instead, while later tokens keep their positions, gives the same distances.
"""

from __future__ import annotations

from torch import Tensor

from kvfold.cache.state import LayerState
from kvfold.kernels.gather import pick, take
from kvfold.observers.base import pick_known


def moved_up(
    state: LayerState, slots: Tensor, changed: list[Tensor] | None = None
) -> tuple[list[Tensor], Tensor]:
    """Keys and values of the entries at `slots [B, H, K]`, and by how much the keys have moved.

    `changed` are keys and values `[B, H, K, ·]` after a merge; None: those that are stored. The
    last entry of each head moves to the position before the row's next token, and the others stand
    before it without gaps; keys are rotated in float32. Moves `[B, H, K]`, int32, are counted from
    the token's own position, 0 at holes.
    """
    keys, values = changed or [take(entries, slots) for entries in state.stored().dense()]
    real = slots >= 0
    from_end = real.flip(-1).cumsum(-1).flip(-1)  # 1 for the newest entry
    place = state.seen_per_row().view(-1, 1, 1) - from_end
    moves = (place - pick(state.positions(), slots, 0)).masked_fill(~real, 0)
    before = state.observers.moves.moves
    by = moves if before is None else moves - pick_known(before, slots, 0)
    return [state.plan.rotation(keys, by), values], moves.int()
