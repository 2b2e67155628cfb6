# SPDX-License-Identifier: Apache-2.0
"""Heads of all ranks, joined from those that each holds."""

import pytest
import torch

from kvfold.errors import KvfoldError
from kvfold.serve.vllm.evictions.rank_heads import RankHeads

SIZE = 3


@pytest.mark.parametrize("heads, size", [(4, 1), (4, 2), (4, 4), (2, 4), (1, 3)])
def test_every_rank_gets_the_rows_of_every_head(heads, size):
    lengths = [5, 0, 3, 7][:heads]
    rows = [torch.randn(length, SIZE) for length in lengths]
    queries = torch.randn(12, 2, SIZE)
    given = []

    def note(own):
        given.append(own)
        return torch.cat([own] * size)

    ranks = [RankHeads(rank, size, heads, note) for rank in range(size)]
    for each in ranks:
        each.heads(rows[each.own], lengths)
    assert size == 1 or len({tuple(own.shape) for own in given}) == 1
    for each in ranks:
        each._gather = lambda own: torch.cat(given)
        for found, expected in zip(each.heads(rows[each.own], lengths), rows, strict=True):
            assert torch.equal(found, expected)
    of_ranks = queries.chunk(size)
    for rank, each in enumerate(ranks):
        each._gather = lambda own: torch.cat(of_ranks)
        assert torch.equal(each.queries(queries if size == 1 else of_ranks[rank]), queries)


def test_heads_that_cannot_be_dealt_out_are_refused():
    with pytest.raises(KvfoldError, match="3 KV heads cannot be dealt out to 2 ranks"):
        RankHeads(0, 2, 3, torch.clone)
