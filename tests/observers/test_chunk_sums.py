# SPDX-License-Identifier: Apache-2.0
"""Chunks of a prefill that comes in pieces: as at once, in each row by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.kernels.chunk_attention import chunk_sums
from kvfold.observers.chunk_sums import ChunkSumsNeed, QueryChunks

LENGTHS, N = (37, 20, 3), 37


def read(need: ChunkSumsNeed, pieces: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Sums `[B, H, N]` after a prefill in such pieces, and its queries and keys."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 6, N, 8, generator=generator)
    keys = torch.randn(3, 2, N, 8, generator=generator)
    place = torch.arange(N) - (N - torch.tensor(LENGTHS))[:, None]
    sums, chunks, start = torch.ones(3, 2, N), QueryChunks(), 0
    for piece in pieces:
        stop = start + piece
        chunks.add(
            queries[:, :, start:stop], keys[:, :, start:stop], place[:, start:stop] >= need.first
        )
        for end in [False, True] if stop == N else [False]:
            completed = chunks.complete(need, end)
            if completed is not None:
                new, known = completed
                newest = sums[:, :, stop - new.shape[2] : stop]
                newest.copy_(new.where(known[:, None], newest))
        start = stop
    assert chunks.nbytes() == 0
    return sums, queries, keys


@pytest.mark.parametrize("need", [ChunkSumsNeed(8), ChunkSumsNeed(8, first=2, last=3)])
@pytest.mark.parametrize("pieces", [[N], [10, 10, 10, 7], [1] * N, [36, 1]])
def test_pieces_are_as_at_once_and_rows_as_alone(need: ChunkSumsNeed, pieces: list[int]) -> None:
    sums, queries, keys = read(need, pieces)
    for row, length in enumerate(LENGTHS):
        first = N - length + min(need.first, length)
        last = max(first, N - need.last)
        own = sums[row]
        assert bool((own[:, :first] == 1).all())  # in no chunk
        for start, stop, size in ((first, last, need.size), (last, N, max(1, need.last))):
            for at in range(start, stop, size):
                columns = torch.arange(at, min(at + size, stop))[None]
                one = chunk_sums(
                    queries[row : row + 1], keys[row : row + 1], columns, columns.shape[1]
                )
                torch.testing.assert_close(own[:, columns[0]], one[0])


def test_few_tokens_wait() -> None:
    chunks = QueryChunks()
    for _ in range(9):
        chunks.add(torch.zeros(1, 2, 10, 4), torch.zeros(1, 1, 10, 4), torch.ones(1, 10).bool())
        chunks.complete(ChunkSumsNeed(16, last=2), end=False)
        assert chunks.waiting is not None and chunks.waiting.waits.shape[1] < 16 + 2


def test_nothing_waits_before_a_prefill() -> None:
    assert QueryChunks().complete(ChunkSumsNeed(4), end=True) is None
