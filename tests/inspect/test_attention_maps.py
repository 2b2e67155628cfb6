# SPDX-License-Identifier: Apache-2.0
"""What `kvfold inspect` measures against dense attention, what it keeps, and its page."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.inspect.attention_maps import (
    CELLS,
    MOST,
    SINKS,
    THRESHOLDS,
    cuts,
    lazy_window,
    watch_attention,
)
from tests.helpers.inspected import TOKENS, dense, ids
from tests.helpers.models import build
from tests.helpers.operations import LargestTensor


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "deepseek_v3"])
def test_statistics_are_those_of_dense_attention(family: str) -> None:
    model, input_ids = build(family), ids()
    truth = dense(model, input_ids)
    found = watch_attention(model, input_ids)
    assert found
    if family in ("gpt_oss", "gemma2"):  # every other layer slides, and is left out
        assert [layer.index for layer in found] == [1, 3]
    for layer in found:
        attention = truth[layer.index].double()
        close = {"rtol": 2e-4, "atol": 2e-6}
        heads = attention.shape[0]
        kv_heads = len(layer.holders)
        spans = cuts(TOKENS, CELLS)
        for i, j in [(0, 0), (5, 2), (50, 50), (95, 0), (95, 94), (40, 41)]:
            rows, columns = slice(spans[i], spans[i + 1]), slice(spans[j], spans[j + 1])
            mass = attention[:, rows, columns].sum(-1).mean()
            torch.testing.assert_close(layer.cells[i, j].double(), mass, **close)
        entropy = -(attention * attention.clamp(min=1e-300).log()).sum(-1).mean(-1)
        torch.testing.assert_close(layer.entropy.double(), entropy, **close)
        # Of latents, which all heads share, one sum is kept for all of them.
        stored = 1 if family == "deepseek_v3" else kv_heads
        received = attention.sum(1).view(stored, heads // stored, TOKENS).mean(1)
        received = received.repeat_interleave(kv_heads // stored, 0)
        torch.testing.assert_close(layer.variance.double(), received.var(-1), rtol=1e-3, atol=1e-6)
        assert layer.holders.tolist() == [fewest(row.tolist()) for row in received]
        edges = at_edges(attention, lazy_window(TOKENS))
        torch.testing.assert_close(layer.edges.double(), edges, **close)
        assert layer.lazy == pytest.approx(float(edges[-1]), rel=2e-4)
        check_norms(attention[:, -1], layer.kept.tolist())


def fewest(received: list[float]) -> int:
    held, total = 0.0, sum(received)
    for count, value in enumerate(sorted(received, reverse=True), 1):
        held += value
        if held >= MOST * total:
            return count
    raise AssertionError


def at_edges(attention: Tensor, window: int) -> Tensor:
    mass = []
    for query in range(attention.shape[1]):
        inside = [j for j in range(query + 1) if j < SINKS or query - j < window]
        mass.append(attention[:, query, inside].sum(-1).mean())
    return torch.stack(mass)


def check_norms(row: Tensor, kept: list[int]) -> None:
    """`kept` entries lose at most each threshold of the norm, and one entry less loses more."""

    def loss(count: int) -> float:
        candidates = row[:, SINKS:]
        left = candidates[:, TOKENS - count :] if count > SINKS else candidates[:, :0]
        base = candidates.norm(dim=-1).mean()
        return float((base - left.norm(dim=-1).mean()) / base)

    assert len(set(kept)) > 4
    for threshold, count in zip(THRESHOLDS, kept, strict=True):
        assert loss(count) <= threshold * (1 + 1e-3)
        assert count == SINKS + 1 or loss(count - 1) > threshold * (1 - 1e-3)


def test_rows_of_cells_are_all_of_a_query_s_attention() -> None:
    layers = watch_attention(build("llama"), ids())
    for layer in layers:
        assert layer.cells.shape == (CELLS, CELLS)
        torch.testing.assert_close(layer.cells.sum(-1), torch.ones(CELLS), rtol=1e-4, atol=1e-4)
        assert torch.equal(layer.cells, layer.cells.tril())
        assert bool((layer.edges[: lazy_window(TOKENS)] > 0.999).all())


@pytest.mark.slow
def test_no_matrix_of_all_queries_and_entries_is_made() -> None:
    tokens = 1500
    with LargestTensor() as largest:
        watch_attention(build("llama"), ids(tokens))
    assert 0 < largest.elements < tokens * tokens / 2


@pytest.mark.slow
def test_a_text_shorter_than_the_grid_has_a_cell_for_every_token() -> None:
    layers = watch_attention(build("llama"), ids(7))
    assert layers[0].cells.shape == (7, 7)
    torch.testing.assert_close(layers[0].cells, dense(build("llama"), ids(7))[0].mean(0))


def test_watching_tells_of_each_layer_and_leaves_the_model_as_it_was() -> None:
    model, seen = build("llama"), []
    before = model(ids()).logits
    watch_attention(model, ids(), lambda: seen.append(1))
    assert len(seen) == 4
    torch.testing.assert_close(model(ids()).logits, before, rtol=0, atol=0)
