# SPDX-License-Identifier: Apache-2.0
"""What methods keep of a text and of its needles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvfold
from kvfold.inspect.attention_maps import LayerAttention
from kvfold.inspect.inspected_text import InspectedText, NeedleSpan
from kvfold.inspect.page import contents
from kvfold.inspect.retention import Retention, heads_per_token, measure_retention
from kvfold.methods.stages.allocate.density import by_density


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pyramidkv", "adakv", "kvzip", "d2o", "dbudgetkv"])
def test_holdings_are_the_positions_of_the_cache(bundled: tuple[Any, Any], method: str) -> None:
    model, tokenizer = bundled
    document = InspectedText.with_needles(tokenizer, 400, seed=2)
    found = measure_retention(model, tokenizer, document, method, kvfold.Budget.ratio(0.3))
    limit = None if method == "dbudgetkv" else 0.3
    context = kvfold.compress(
        model, tokenizer, document.text, method, limit, special_tokens=document.special_tokens
    )
    assert torch.equal(context.ids, document.ids)
    expected = torch.zeros_like(found.counts)
    for layer in range(4):
        for head in context.cache.positions(layer)[0]:
            for position in head.tolist():
                expected[layer, position] += 1
    assert torch.equal(found.counts, expected)
    assert found.heads == (4, 4, 4, 4)
    assert found.kept == pytest.approx(context.stats().kept_fraction)
    assert found.nbytes == context.stats().nbytes


def test_what_needles_keep_is_counted_over_their_entries() -> None:
    layers = [[[torch.tensor([0, 1, 5]), torch.tensor([], dtype=torch.long)]]] * 2
    counts = heads_per_token(layers, 6)
    assert counts.tolist() == [[1, 1, 0, 0, 0, 1]] * 2
    retention = Retention("m", "b", counts, (2, 2), 1, 2, False)
    assert retention.kept_of([NeedleSpan(0, 2, True), NeedleSpan(4, 6, False)]) == 6 / 16
    assert retention.shares[0].tolist() == [0.5, 0.5, 0, 0, 0, 0.5]


def test_d2o_s_share_is_that_of_its_own_allocation(
    looked_at: tuple[InspectedText, list[LayerAttention], list[Retention]],
) -> None:
    document, layers, retentions = looked_at
    variances = [layer.variance[None] for layer in layers]
    sizes = by_density(variances, torch.tensor([10000]), torch.tensor([10**6]))
    expected = [int(size) / 10000 for size in sizes]
    assert contents("m", document, layers, retentions)["d2o"] == pytest.approx(expected, abs=1e-3)
