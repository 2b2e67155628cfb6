# SPDX-License-Identifier: Apache-2.0
"""The reference of attention with column sums, against torch and a naive loop."""

import math

import pytest
import torch
import torch.nn.functional as F

from kvfold.kernels import query_blocks as chunked
from kvfold.kernels import reference
from tests.helpers.kernel_inputs import additive, assert_same, causal, inputs, random_mask

KERNELS = pytest.mark.parametrize("kernel", [reference, chunked], ids=["reference", "chunked"])
GROUPS = pytest.mark.parametrize("groups", [1, 2, 4])
SCALE = 0.3


def naive(query, key, value, mask, softcap=None, sink_logits=None, counted=None):
    """One query head, one query, one key at a time, in python floats."""
    batch, query_heads, queries, _ = query.shape
    heads, stored = key.shape[1:3]
    groups = query_heads // heads
    out = torch.zeros(batch, query_heads, queries, value.shape[-1], dtype=torch.float64)
    received = torch.zeros(batch, heads, queries, stored, dtype=torch.float64)
    for b in range(batch):
        for h in range(query_heads):
            for i in range(queries):
                weights = []
                for j in range(stored):
                    logit = float(query[b, h, i] @ key[b, h // groups, j]) * SCALE
                    logit = logit if softcap is None else softcap * math.tanh(logit / softcap)
                    weights.append(math.exp(logit) if mask[b, h, i, j] else 0.0)
                total = sum(weights) + (0.0 if sink_logits is None else math.exp(sink_logits[h]))
                for j in range(stored if total else 0):
                    share = weights[j] / total
                    out[b, h, i] += share * value[b, h // groups, j]
                    if counted is None or counted[b, i]:
                        received[b, h // groups, i, j] += share / groups
    return out, received.sum(2), (received**2).sum(2)


@KERNELS
def test_causal_column_sums_golden(kernel):
    query = torch.tensor([[[[1.0, 0], [0, 1], [1, 1]]]], dtype=torch.float64)
    key = torch.tensor([[[[1.0, 0], [0, 2], [1, 1]]]], dtype=torch.float64)
    value = torch.eye(3, dtype=torch.float64)[None, None]
    rows, sums, _ = kernel.attend_with_moments(query, key, value, None, scale=2**-0.5)
    # With one-hot values the output is the attention itself.
    golden = [1, 0, 0, 0.195570, 0.804430, 0, 0.197776, 0.401112, 0.401112]
    assert rows.flatten().tolist() == pytest.approx(golden, abs=1e-6)
    assert sums.flatten().tolist() == pytest.approx([1.393346, 1.205542, 0.401112], abs=1e-6)
    assert sums.sum().item() == pytest.approx(3, abs=1e-12)
    assert sums.var().item() == pytest.approx(0.277818, abs=1e-6)


@KERNELS
def test_squares_give_the_golden_deviations(kernel):
    rows = torch.tensor([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0.5, 0.3]], dtype=torch.float64)
    key = torch.eye(3, dtype=torch.float64)[None, None]
    query = rows.log().clamp(min=-9)[None, None]
    _, sums, squares = kernel.attend_with_moments(query, key, key, None, scale=1.0)
    seen_by = torch.tensor([3, 2, 1])
    mean = sums[0, 0] / seen_by
    deviation = (squares[0, 0] / seen_by - mean**2).clamp(min=0).sqrt()
    assert mean.tolist() == pytest.approx([0.566667, 0.5, 0.3], abs=1e-6)
    assert deviation.tolist() == pytest.approx([0.329983, 0, 0], abs=1e-6)


@GROUPS
@pytest.mark.parametrize(("queries", "stored"), [(17, 17), (5, 17), (1, 17)])
def test_reference_attends_as_torch_does(groups, queries, stored):
    query, key, value = inputs(queries, stored, groups)
    mask = causal(queries, stored)
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=SCALE, enable_gqa=True
    )
    for given in (None, mask[None, None], additive(mask, torch.float64)[None, None]):
        out, _ = reference.attend_with_column_sums(query, key, value, given, scale=SCALE)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@KERNELS
@GROUPS
def test_every_option_at_once_is_the_naive_loop(kernel, groups):
    query, key, value = inputs(6, 9, groups)
    mask = random_mask(2, 2 * groups, 6, 9)
    sink_logits = torch.linspace(-1, 2, 2 * groups, dtype=torch.float64)
    counted = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1]], dtype=torch.bool)
    options = {"softcap": 1.2, "sink_logits": sink_logits, "counted": counted}
    expected = naive(query, key, value, mask, **options)
    for given in (mask, additive(mask, torch.float64)):
        got = kernel.attend_with_moments(query, key, value, given, scale=SCALE, **options)
        assert_same(got, expected, 1e-10)


@KERNELS
@pytest.mark.parametrize("option", ["softcap", "sink_logits", "counted", "mask"])
def test_each_option_alone_is_the_naive_loop(kernel, option):
    query, key, value = inputs(6, 9, groups=2)
    mask = causal(6, 9).expand(2, 4, 6, 9)
    options = {
        "softcap": {"softcap": 0.8},
        "sink_logits": {"sink_logits": torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)},
        "counted": {"counted": torch.tensor([[0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1]]).bool()},
        "mask": {},
    }[option]
    if option == "mask":
        mask = random_mask(2, 4, 6, 9)
    expected = naive(query, key, value, mask, **options)
    given = mask if option == "mask" else None
    got = kernel.attend_with_moments(query, key, value, given, scale=SCALE, **options)
    assert_same(got, expected, 1e-10)


@KERNELS
@GROUPS
@pytest.mark.parametrize("masked", [False, True])
def test_sums_are_the_same_without_squares(kernel, masked, groups):
    query, key, value = inputs(130, 150, groups)
    mask = random_mask(2, 1, 130, 150) if masked else None
    counted = torch.arange(130).expand(2, -1) % 3 > 0
    options = {"scale": SCALE, "counted": counted}
    *expected, _ = kernel.attend_with_moments(query, key, value, mask, **options)
    if kernel is chunked:
        *got, squares = chunked.attend_with_moments(
            query, key, value, mask, squares=False, **options
        )
        assert squares is None
    else:
        got = reference.attend_with_column_sums(query, key, value, mask, **options)
    assert_same(got, expected, 1e-12)


@KERNELS
def test_a_query_that_sees_nothing_answers_with_zeros(kernel):
    query, key, value = inputs(6, 9)
    mask = random_mask(2, 4, 6, 9)
    blind = ~mask.any(-1)
    assert blind.any() and not blind.all()
    out, sums, _ = kernel.attend_with_moments(query, key, value, mask, scale=SCALE)
    assert out[blind].eq(0).all()
    assert out[~blind].ne(0).any(-1).all()
    assert sums[0, :, :5].eq(0).all()
    seeing = (~blind).unflatten(1, (2, 2)).double().mean(2).sum(-1)
    torch.testing.assert_close(sums.sum(-1), seeing, rtol=0, atol=1e-12)
