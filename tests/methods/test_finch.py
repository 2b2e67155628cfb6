# SPDX-License-Identifier: Apache-2.0
"""Finch: rows of the question weighted by what they see, by hand and on padded prompts."""

from __future__ import annotations

import pytest
import torch

from kvfold import KvfoldError, parse
from kvfold.methods.finch import weighted_rows
from tests.helpers.budgets import SMALL
from tests.helpers.by_hand import (
    SHAPES,
    WINDOW,
    Head,
    assert_prefill,
    best,
    newest,
    per_head,
)
from tests.helpers.observations import (
    KEYS,
    QUERIES,
    alone,
    mean_of_groups,
    naive_rows,
    observe,
    observed,
)

PLAIN = f"positions=original,window={WINDOW}"


# Eight keys: the queries at 6 and 7 see 7 and 8 of them, and have 6 and 7 before their own.
@pytest.mark.parametrize(
    ("weight", "factors"), [("visible", (7, 8)), ("before", (6, 7)), ("none", (1, 1))]
)
@pytest.mark.parametrize("left", [0, 3])
def test_rows_are_weighted_by_what_they_see(weight, factors, left) -> None:
    scores = weighted_rows(observed(window=2, left=left), window=2, weight=weight)
    rows = [(KEYS[: at + 1].double() @ QUERIES[at].double() / 2).softmax(0) for at in (6, 7)]
    expected = [(factors[0] * rows[0][i] + factors[1] * rows[1][i]) / 2 for i in range(6)]
    torch.testing.assert_close(
        scores[0, 0, left:].double(), torch.stack([*expected, *torch.zeros(2)]).double()
    )


@pytest.mark.parametrize("groups", [1, 3, 8])
def test_rows_are_averaged_over_the_group_and_padding_is_none(groups) -> None:
    seen = observe((20, 13, 5), groups=groups)
    scores = weighted_rows(seen, window=8, weight="visible")
    for row, length in enumerate((20, 13, 5)):
        own = alone(seen, row, length)
        rows = naive_rows(own)
        window = rows.shape[1]
        factors = torch.arange(length - window + 1, length + 1).double()
        mean = mean_of_groups((rows * factors[None, :, None]).mean(1), groups)
        mean[:, max(0, length - 8) :] = 0
        torch.testing.assert_close(scores[row, :, -length:].double(), mean, atol=1e-5, rtol=1e-5)


def by_rows(head: Head, weight: str = "visible") -> list[float]:
    """Weighted mean of the last WINDOW rows over each entry before them."""
    factors = [at + (weight == "visible") for at in head.positions[-WINDOW:]]
    rows = head.rows[:, -WINDOW:, :-WINDOW].mean(0)
    return [sum(f * float(row[i]) for f, row in zip(factors, rows, strict=True))
            for i in range(rows.shape[1])]  # fmt: skip


@pytest.mark.slow
@SHAPES
@pytest.mark.parametrize("weight", ["visible", "before"])
def test_finch_keeps_what_weighted_rows_choose(heads, lengths, weight) -> None:
    def choose(head: Head) -> list[int]:
        return best(by_rows(head, weight), SMALL - WINDOW) + newest(head, WINDOW)

    assert_prefill(f"finch:{PLAIN},weight={weight}", SMALL, heads, lengths, per_head(choose))


@pytest.mark.slow
@SHAPES
def test_with_chunks_each_keeps_the_same_part(heads, lengths) -> None:
    def choose(head: Head) -> list[int]:
        scores, chunks = by_rows(head), range(0, len(head) - WINDOW, 16)
        sizes = [min(16, len(head) - WINDOW - first) for first in chunks]
        shares = [(SMALL - WINDOW) * size / sum(sizes) for size in sizes]
        counts = [int(share + 1e-9) for share in shares]
        order = sorted(range(len(sizes)), key=lambda i: (counts[i] - shares[i], i))
        for i in order[: SMALL - WINDOW - sum(counts)]:
            counts[i] += 1
        kept = newest(head, WINDOW)
        for first, size, count in zip(chunks, sizes, counts, strict=True):
            kept += [first + i for i in best(scores[first : first + size], count)]
        return kept

    assert_prefill(f"finch:{PLAIN},chunk=16", SMALL, heads, lengths, per_head(choose))


def test_values_out_of_range_are_refused() -> None:
    for wrong in ("window=0", "chunk=-1", "weight=all"):
        with pytest.raises(KvfoldError):
            parse(f"finch:{wrong}")
