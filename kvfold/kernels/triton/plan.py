# SPDX-License-Identifier: Apache-2.0
"""`LaunchPlan`: how a decode step's attention to segments is divided among a GPU's programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Entries that a program reads at a time
BLOCK = 64
# Plans that graphs may hold
_used_with = WeakTensorKeyDictionary()
# Programs of a launch: about four per multiprocessor of a large GPU; a part has two blocks or more.
PROGRAMS = 512


class Room(NamedTuple):
    """Slots that segments have in a rectangle, and the first of each segment that has an entry."""

    width: int
    gaps: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """Parts of R segments, of `size` entries each: program i has part `part[i]` of `segment[i]`.

    A segment's entries in order: `lengths[s]` that were encoded, whose keys begin at row
    `key_starts[s]`, values at `value_starts[s]`; then those of two rectangles, from slot
    `gaps[0, s]` and `gaps[1, s]` on. It has the programs from `first[s]` to `first[s + 1] − 1`.
    Everything is on the device, and lasts while `rooms` suffice: entries are counted there.
    """

    segment: Tensor  # [programs], int32
    part: Tensor
    first: Tensor  # [R + 1], int32
    lengths: Tensor  # [R], int32
    gaps: Tensor  # [2, R], int32
    key_starts: Tensor  # [R], int64
    value_starts: Tensor
    _: KW_ONLY
    rooms: tuple[int, int]  # slots of the rectangles
    size: int

    @classmethod
    def of(
        cls,
        keys: Sequence[int],
        values: Sequence[int],
        rooms: tuple[Room, Room],
        device: torch.device | str,
        size: int | None = None,
    ) -> LaunchPlan:
        """From the numbers of encoded keys and of encoded values in each segment.

        Where these differ, the first entries have both, and no others are read.
        """
        of_keys, of_values = torch.tensor(keys), torch.tensor(values)
        gaps = torch.tensor([room.gaps for room in rooms])
        lengths = torch.minimum(of_keys, of_values)
        most = lengths + sum(room.width for room in rooms) - gaps.sum(0)
        if size is None:
            size = max(2 * BLOCK, BLOCK * -(-int(most.sum()) // (PROGRAMS * BLOCK)))
        assert size % BLOCK == 0  # words of codes are not divided
        counts = (most + size - 1) // size
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        segment = torch.arange(len(counts)).repeat_interleave(counts)
        part = torch.arange(len(segment)) - first[segment]
        firsts = [each.cumsum(0) - each for each in (of_keys, of_values)]
        small = [each.int().to(device) for each in (segment, part, first, lengths, gaps)]
        starts = [each.to(device) for each in firsts]
        return cls(*small, *starts, rooms=(rooms[0].width, rooms[1].width), size=size)


def plan_for(
    keys: Sequence[int],
    values: Sequence[int],
    rooms: tuple[Room, Room],
    buffer: Tensor,
) -> LaunchPlan:
    """As `LaunchPlan.of`, one plan for all layers and steps until entries are encoded or evicted.

    Rectangles may grow by an eighth of their slots, or a block, until there is another. A CUDA
    graph holds addresses alone, so a plan lives as long as the `buffer` with which it was used.
    """
    beside, tail = (Room(_rounded(room.width), room.gaps) for room in rooms)
    plan = _known(tuple(keys), tuple(values), (beside, tail), buffer.device)
    _used_with.setdefault(buffer, set()).add(plan)
    return plan


@lru_cache(maxsize=512)
def _known(
    keys: tuple[int, ...],
    values: tuple[int, ...],
    rooms: tuple[Room, Room],
    device: torch.device,
) -> LaunchPlan:
    return LaunchPlan.of(keys, values, rooms, device)


def _rounded(width: int) -> int:
    step = max(BLOCK, 1 << max(0, width.bit_length() - 4))
    return -(-width // step) * step
