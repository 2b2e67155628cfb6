# SPDX-License-Identifier: Apache-2.0
"""Costs: operations are those of the products written out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvfold.measure.cost import Cost, ForwardCost, measured

CPU = torch.device("cpu")


def test_products_count_two_per_multiply_add():
    x, weight = torch.randn(3, 5), torch.randn(7, 5)
    with measured(CPU) as cost:
        F.linear(x, weight)
        x + x
    assert cost.operations == 2 * 3 * 5 * 7
    assert cost.seconds > 0


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_counts_both_of_its_products(causal):
    query, keys = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 9, 8)
    keys = keys[:, :, :6] if causal else keys
    with measured(CPU) as cost:
        F.scaled_dot_product_attention(query, keys, keys, is_causal=causal)
    assert cost.operations == 2 * 2 * (2 * 4 * 6 * keys.shape[2] * 8)


def test_costs_add_and_an_unknown_one_stays_unknown():
    assert Cost(1, 2) + Cost(3, 4) == Cost(4, 6)
    assert Cost(1, 2) + Cost(3) == Cost(4, None)


def test_an_exception_is_passed_on_and_its_cost_is_known():
    with pytest.raises(ValueError, match="so"), measured(CPU) as cost:
        torch.ones(2, 2) @ torch.ones(2, 2)
        raise ValueError("so")
    assert cost.operations == 16


def test_a_forward_is_what_happens_before_its_token():
    ids, x = torch.zeros(2, 3), torch.ones(2, 2)
    with ForwardCost(CPU, token=0) as prefill, ForwardCost(CPU, token=1) as step:
        for products in (3, 1, 2):
            for _ in range(products):
                x @ x
            assert not (prefill(ids, None) | step(ids, None)).any()
    assert prefill.cost is not None and prefill.cost.operations == 3 * 16
    assert step.cost is not None and step.cost.operations == 16


def test_a_forward_without_a_token_has_no_cost_and_is_counted_no_longer():
    ids, x = torch.zeros(2, 3), torch.ones(2, 2)
    with pytest.raises(ValueError, match="so"), ForwardCost(CPU, token=1) as step:
        step(ids, None)
        x @ x
        raise ValueError("so")
    with measured(CPU) as after:
        x @ x
    assert step.cost is None and after.operations == 16
