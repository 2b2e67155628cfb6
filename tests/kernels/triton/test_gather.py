# SPDX-License-Identifier: Apache-2.0
"""Triton's gathering of kept entries."""

import pytest
import torch

from kvfold.kernels import gather as rows_of
from kvfold.kernels.triton import (
    gather_rows,
)
from kvfold.store.encoding import Encode
from kvfold.store.ragged import RaggedStore
from tests.helpers.gpu_inputs import (
    noise,
    starts_of,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter", "poison")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize(("size", "value_size"), [(32, 32), (64, 24), (128, 128)])
def test_gathering_kept_entries(size, value_size, dtype):
    batch, heads, stored, width = 2, 3, 90, 70
    keys = noise(batch, heads, stored + 2, size, seed=1, dtype=dtype)[:, :, :stored]
    values = noise(batch, stored, heads, value_size, seed=2, dtype=dtype).transpose(1, 2)
    counts = [70, 0, 1, 33, 64, 32]
    slots = torch.full((batch * heads, width), -1, device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    for of_segment, n in zip(slots, counts, strict=True):
        chosen = torch.randperm(stored, generator=generator)[:n].sort().values
        of_segment[width - n :] = chosen.to(DEVICE)
    got = gather_rows(keys, values, slots.unflatten(0, (batch, heads)))
    for flat, rows in zip(got[:2], (keys, values), strict=True):
        expected = [
            rows[i // heads, i % heads, slot]
            for i, of_segment in enumerate(slots.tolist())
            for slot in of_segment
            if slot >= 0
        ]
        assert torch.equal(flat, torch.stack(expected))
    assert got[2].tolist() == starts_of(counts).tolist()


def test_segments_are_gathered_by_the_kernel(monkeypatch):
    """Holes, a broken block, and a segment without a whole one."""
    monkeypatch.setattr(rows_of, "_flat", None)
    keys, values = noise(1, 3, 60, 32, seed=1), noise(1, 3, 60, 32, seed=2)
    slots = torch.arange(10, 60, device=DEVICE).repeat(1, 3, 1)
    slots[0, 1, :40] = slots[0, 2, :18] = -1
    positions = torch.arange(60, device=DEVICE).expand(1, 3, -1)
    held = RaggedStore(keys, values, positions, slots, Encode())
    parts = (held.view().keys, keys), (held.view().values, values)
    for part, rows in parts:
        assert part.encoded.lengths == [48, 0, 32] and part.gaps == (8, 0, 10)
        for i in range(3):
            expected = rows[0, i, slots[0, i][slots[0, i] >= 0]]
            assert torch.equal(torch.cat(part.pieces(i)), expected)


def test_gathering_nothing():
    rows = noise(1, 2, 5, 32, seed=1)
    keys, values, starts = gather_rows(rows, rows, torch.full((1, 2, 4), -1, device=DEVICE))
    assert keys.shape == values.shape == (0, 32) and starts.tolist() == [0, 0, 0]
