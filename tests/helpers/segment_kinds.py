# SPDX-License-Identifier: Apache-2.0
"""Entries of segments of every kind that Triton's kernel reads, and what they stand for."""

import torch

from kvfold.kernels.per_token import RotatedKeys, TokenValues
from kvfold.kernels.triton import LaunchPlan, Rectangle, Room, Segments
from kvfold.kernels.views import Flat
from tests.helpers.gpu_inputs import DEVICE, noise, packed, segments

# Encoded entries of each segment: none, one, whole blocks, many; and what is whole among them.
LENGTHS = [0, 32, 64, 96, 0, 320]
VALUE_LENGTHS = [0, 1, 63, 96, 40, 300]  # of packed ones, which differ
SINKS = [0, 1, 2, 0, 0, 4]
# Raw entries beside them: as many as slots that a segment's gap leaves.
BESIDE, TAIL = Room(5, (0, 5, 2, 0, 5, 1)), Room(70, (70, 69, 0, 6, 70, 5))
BITS = {
    "packed 2": 2,
    "packed 4": 4,
    "packed 8": 8,
    "per token 1 2": (1, 2),
    "per token 2 3": (2, 3),
    "per token 3 4": (3, 4),
    "per token 4 2": (4, 2),
    "per token 8 4": (8, 4),
}
KINDS = ("none", "raw", *BITS)
# The interpreter multiplies in float32, whatever the dtype: outputs are rounded once.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
if DEVICE == "cuda":
    TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def encoded(kind, sizes, dtype):
    """Entries of a kind, and the keys `[n, D]` and values `[n, Dv]` of each segment."""
    if kind == "none":
        return None, *([noise(0, size, seed=1, dtype=dtype)] * 6 for size in sizes)
    if kind == "raw":
        keys = segments(LENGTHS, sizes[0], 100, dtype)
        values = segments(LENGTHS, sizes[1], 200, dtype)
        return Segments(Flat.of(keys), Flat.of(values)), keys, values
    if kind.startswith("packed"):
        bits = BITS[kind]
        keys, of_keys = packed(LENGTHS, sizes[0], bits, 32, True, dtype, 100)
        values, of_values = packed(VALUE_LENGTHS, sizes[1], bits, 16, False, dtype, 200)
        both = zip(of_keys, of_values, strict=True)
        pairs = [(key[: len(value)], value[: len(key)]) for key, value in both]
        return Segments(keys, values), *map(list, zip(*pairs, strict=True))
    of_keys, of_values = BITS[kind]
    keys = RotatedKeys.of(segments(LENGTHS, sizes[0], 100, dtype), of_keys, True, SINKS)
    values = TokenValues.of(segments(LENGTHS, sizes[1], 200, dtype), of_values, SINKS)
    decoded = (list(part.decoded.split(part.codes.lengths)) for part in (keys, values))
    return Segments(keys, values), *decoded


def raw_beside(room, sizes, seed, dtype):
    """Raw entries in a buffer with more slots, nonsense in those of no entry; and the entries."""
    parts = []
    for at, size in enumerate(sizes):
        buffer = noise(len(room.gaps), room.width + 3, size, seed=seed + at, dtype=dtype)
        buffer[:, room.width :] = torch.nan
        for rows, gap in zip(buffer, room.gaps, strict=True):
            rows[:gap] = torch.nan
        parts.append(buffer[:, : room.width])
    of_segments = (
        [rows[gap:] for rows, gap in zip(part, room.gaps, strict=True)] for part in parts
    )
    return Rectangle(*parts), *of_segments


def of_every_source(kind, sizes, dtype):
    """Encoded entries, both rectangles, and the keys and values of each segment in order."""
    old, *first = encoded(kind, sizes, dtype)
    beside, *second = raw_beside(BESIDE, sizes, 300, dtype)
    tail, *third = raw_beside(TAIL, sizes, 400, dtype)
    keys, values = (
        [torch.cat(rows) for rows in zip(*parts, strict=True)]
        for parts in zip(first, second, third, strict=True)
    )
    return old, (beside, tail), keys, values


def planned(old, rooms=(BESIDE, TAIL), size=None):
    """A plan of its own, with parts of `size` entries."""
    lengths = ([0] * 6, [0] * 6) if old is None else old.lengths
    return LaunchPlan.of(*lengths, rooms, DEVICE, size)


def assert_near(got, expected, dtype):
    """Output and log-sum-exp are those of float64, of the query's dtype and of float32."""
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    for mine, other in zip(got, expected, strict=True):
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(mine.double(), other, rtol=tolerance, atol=tolerance)
