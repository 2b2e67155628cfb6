# SPDX-License-Identifier: Apache-2.0
"""Triton's attention to segments of plain entries, against naive float64."""

import pytest
import torch

from kvfold.kernels.triton import (
    Splits,
    attend_to_rows,
)
from tests.helpers.gpu_inputs import (
    SCALE,
    assert_close,
    attended,
    noise,
    segments,
    starts_of,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter", "poison")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [0, 1, 63, 64, 65, 0, 300]
GROUPS = pytest.mark.parametrize("groups", [1, 4, 8])
SIZES = pytest.mark.parametrize("size", [32, 64, 128])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


@pytest.mark.slow
@pytest.mark.cases(3)
@GROUPS
@SIZES
@DTYPES
def test_rows_are_attended_to_as_each_segment_alone(groups, size, dtype):
    keys, values = (segments(LENGTHS, size, seed, dtype) for seed in (100, 200))
    query = noise(len(LENGTHS), groups, size, seed=1, dtype=dtype)
    softcap = 2.0 if groups == 4 else None
    starts, splits = starts_of(LENGTHS, torch.int32), Splits.of(LENGTHS, 128, DEVICE)
    rows = torch.cat(keys), torch.cat(values)
    out, lse = attend_to_rows(query, *rows, starts, SCALE, softcap, splits=splits)
    expected = attended(query, keys, values, softcap)
    assert_close(out, expected[0], dtype)
    assert_close(lse, expected[1])


def test_segments_with_room_after_them():
    """Head sizes that differ and fill no power of two; splits for the room, half of it used."""
    room, used = [70, 200, 64, 128], [5, 130, 0, 128]
    keys, values = segments(room, 40, 100, torch.float32), segments(room, 24, 200, torch.float32)
    for key, value, n in zip(keys, values, used, strict=True):
        key[n:] = value[n:] = torch.nan
    query = noise(len(room), 3, 40, seed=1)
    starts = starts_of(room)[:-1]
    ends = starts + torch.tensor(used, device=DEVICE)
    splits = Splits.of(room, 64, DEVICE)
    rows = torch.cat(keys), torch.cat(values)
    out, lse = attend_to_rows(query, *rows, starts, SCALE, ends=ends, splits=splits)
    alive = ([part[:n] for part, n in zip(parts, used, strict=True)] for parts in (keys, values))
    expected = attended(query, *alive)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])
    again = attend_to_rows(query, *rows, starts, SCALE, ends=ends)
    assert_close(again[0], expected[0])


def test_nothing_to_attend_to():
    query, rows = noise(2, 4, 32, seed=1), noise(0, 32, seed=2)
    out, lse = attend_to_rows(query, rows, rows, starts_of([0, 0]), SCALE)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_large_logits_do_not_overflow():
    keys, values = segments([150], 32, 100, torch.float32), segments([150], 32, 200, torch.float32)
    query = 400 * noise(1, 4, 32, seed=1)
    out, lse = attend_to_rows(query, keys[0], values[0], starts_of([150]), SCALE)
    expected = attended(query, keys, values)
    assert_close(out, expected[0], tolerance=1e-3)
    assert_close(lse, expected[1], tolerance=1e-6)


def test_splits_cover_every_entry_once():
    lengths = [0, 1, 64, 65, 1000, 0, 100_000]
    for splits in (Splits.of(lengths), Splits.of(lengths, 64)):
        seen = torch.zeros(len(lengths), dtype=torch.int64)
        pairs = list(zip(splits.segment.tolist(), splits.part.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs)
        for item, (segment, part) in enumerate(pairs):
            assert splits.first[segment] <= item < splits.first[segment + 1]
            seen[segment] += min(splits.size, lengths[segment] - part * splits.size)
        assert seen.tolist() == lengths
    assert len(Splits.of(lengths).segment) <= 512 + len(lengths)
