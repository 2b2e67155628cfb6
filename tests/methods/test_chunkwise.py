# SPDX-License-Identifier: Apache-2.0
"""chunkwise: the same part of each chunk, by another method's scores."""

from __future__ import annotations

import pytest

from kvfold import IllegalComposition, KvfoldError, parse
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import SHAPES, Head, assert_prefill, best, per_head
from tests.helpers.caches import positions, start


@SHAPES
def test_each_chunk_keeps_its_part(heads, lengths) -> None:
    def choose(head: Head) -> list[int]:
        norms = (-head.keys.norm(dim=-1)).tolist()
        sizes = [min(16, len(head) - first) for first in range(0, len(head), 16)]
        shares = [SMALL * size / len(head) for size in sizes]
        counts = [int(share + 1e-9) for share in shares]
        order = sorted(range(len(sizes)), key=lambda i: (counts[i] - shares[i], i))
        for i in order[: SMALL - sum(counts)]:
            counts[i] += 1
        return [
            16 * chunk + i
            for chunk, count in enumerate(counts)
            for i in best(norms[16 * chunk :][:16], count)
        ]

    spec = "knorm:skip_layers=none + chunkwise:length=16"
    assert_prefill(spec, SMALL, heads, lengths, per_head(choose))


def test_one_chunk_is_the_whole_text(model) -> None:
    for spec in ("keydiff", "snapkv:window=8 + adakv"):
        whole = positions(start(model, spec).cache)
        assert positions(start(model, f"{spec} + chunkwise:length=64").cache) == whole
        assert positions(start(model, f"{spec} + chunkwise:length=8").cache) != whole


def test_it_needs_scores_and_a_length() -> None:
    with pytest.raises(IllegalComposition, match="evicts nothing"):
        parse("chunkwise").stages()
    with pytest.raises(KvfoldError, match="chunkwise:length is 1 or more, not 0"):
        parse("chunkwise:length=0")
    with pytest.raises(IllegalComposition, match="both bring the select"):
        parse("snapkv + chunkkv + chunkwise")
