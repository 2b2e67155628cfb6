# SPDX-License-Identifier: Apache-2.0
"""kvtc beside rounding in float64: coefficients, bytes, other entries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvfold.codecs import symbols
from kvfold.codecs.basis import Codes, Scope, Transform
from kvfold.codecs.kvtc import decode, encode
from kvfold.errors import ContextFileError, KvfoldError
from kvfold.kernels.native import products

LAYERS, HEADS, SIZE = 4, 2, 8
SCOPES: list[Scope] = ["joint", "head"]


def orthonormal(*shape: int) -> Tensor:
    return torch.linalg.qr(torch.randn(*shape, shape[-1])).Q


def metrics() -> Tensor:
    """Symmetric, with eigenvalues from 0.5 to 1.5."""
    turned = orthonormal(LAYERS, HEADS, SIZE)
    return (turned * (torch.rand(LAYERS, HEADS, 1, SIZE) + 0.5)) @ turned.mT


def transform(rank: int = 2 * HEADS * SIZE) -> Transform:
    """Two blocks of two layers."""
    torch.manual_seed(0)
    return Transform(
        torch.randn(LAYERS, HEADS, SIZE),
        metrics(),
        orthonormal(2, 2 * HEADS * SIZE)[..., :rank],
        orthonormal(LAYERS, HEADS, SIZE),
    )


def entries(tokens: int = 60) -> list[Tensor]:
    return [torch.randn(tokens, SIZE) for _ in range(LAYERS * HEADS)]


def counts(heads: list[Tensor]) -> list[int]:
    return [len(head) for head in heads]


@pytest.mark.parametrize("scope", SCOPES)
def test_all_directions_lose_nothing(scope, monkeypatch):
    monkeypatch.setattr(products, "available", lambda: False)
    made, heads = transform(), entries()
    halves = [Codes(list(range(len(c))), 2 * c) for c in made.forward(heads, scope)]
    back = made.back(halves, 0.5, scope)
    for found, given in zip(back, heads, strict=True):
        torch.testing.assert_close(found, given, atol=1e-5, rtol=0)


def by_hand(made: Transform, heads: list[Tensor], step: float) -> np.ndarray:
    """Coded entries `[n, L·H·D]` of all heads, float64, with a joint vector for each block."""
    means = made.means.flatten().double().numpy()
    metric = torch.block_diag(*made.metrics.flatten(0, 1)).double().numpy()
    measured, found = (torch.cat(heads, -1).double().numpy() - means) @ metric, []
    for block, part in zip(made.directions.double().numpy(), np.split(measured, 2, 1), strict=True):
        found.append(np.round(part @ block / step) * step @ block.T)
    return np.concatenate(found, 1) @ np.linalg.inv(metric) + means


@pytest.mark.slow
@pytest.mark.parametrize("rank", [32, 20])
def test_coded_entries_are_rounded_coefficients(rank, monkeypatch):
    monkeypatch.setattr(products, "available", lambda: False)
    made, given = transform(rank), entries()
    coded = encode(given, made, "joint", 2600)
    found = torch.cat(decode(coded, made, "joint", counts(given)), -1)
    np.testing.assert_allclose(found, by_hand(made, given, coded.step), atol=1e-4)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("nbytes", [2000, 2600, 4000])
def test_bytes_are_those_asked_for(scope, nbytes):
    coded = encode(entries(), transform(), scope, nbytes)
    assert 0.9 * nbytes < coded.streams.nbytes <= nbytes


@pytest.mark.parametrize("scope", SCOPES)
def test_more_bytes_mean_less_error(scope):
    made, given, errors = transform(), entries(), []
    for nbytes in (1600, 2000, 3000, 6000, 8000, 10**6):
        coded = encode(given, made, scope, nbytes)
        found = decode(coded, made, scope, counts(given))
        pairs = zip(found, given, strict=True)
        errors.append(sum(float((a - b).square().sum()) for a, b in pairs))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-6 * errors[0]


def test_decoded_entries_code_to_themselves():
    made, given = transform(), entries()
    coded = encode(given, made, "head", 1500)
    again = decode(coded, made, "head", counts(given))
    pairs = zip(made.forward(again, "head"), made.forward(given, "head"), strict=True)
    for found, head in pairs:
        assert torch.equal((found / coded.step).round(), (head / coded.step).round())


@pytest.mark.parametrize("sizes", [[5, 0, 1, 9, 2, 2, 30, 4], [0, 5, 1, 9, 2, 2, 30, 0], [0] * 8])
def test_heads_may_have_different_entries_and_none(sizes):
    made = transform()
    heads = [torch.randn(count, SIZE) for count in sizes]
    coded = encode(heads, made, "head", 4000)
    found = decode(coded, made, "head", sizes)
    assert counts(found) == sizes
    for each, head in zip(found, heads, strict=True):
        torch.testing.assert_close(each, head, atol=0.01, rtol=0)


def test_streams_of_a_short_text_do_not_fit():
    assert encode(entries(tokens=8), transform(), "joint", 20) is None


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_numbers_that_are_not_finite_are_refused(number):
    heads = entries()
    heads[3][2, 1] = number
    with pytest.raises(KvfoldError, match="not finite: save the context with"):
        encode(heads, transform(), "joint", 4000)


def test_streams_of_other_entries_are_refused():
    made, given = transform(), entries()
    coded = encode(given, made, "joint", 2500)
    for tokens in (59, 61):
        with pytest.raises(ContextFileError, match=r"codec|damaged"):
            decode(coded, made, "joint", [tokens] * 8)


def test_one_step_is_better_than_one_for_each_token():
    """The paper scales each token; here bytes and squared error are compared at 4 bits."""
    torch.manual_seed(1)
    coefficients = torch.randn(2000, 32) * torch.linspace(-3, 0, 32).exp()
    low, high = coefficients.amin(1, True), coefficients.amax(1, True)
    codes = ((coefficients - low) / (high - low) * 15).round()
    theirs = float((codes / 15 * (high - low) + low - coefficients).square().sum())
    scales = 4  # bytes of a token's two
    nbytes = symbols.encode(list(codes.T - 8)).nbytes + 2000 * scales
    step = 0.01
    while symbols.encode(list((coefficients / step).round().T)).nbytes > nbytes:
        step *= 1.05
    ours = float(((coefficients / step).round() * step - coefficients).square().sum())
    assert ours < 0.2 * theirs


@pytest.mark.skipif(not products.available(), reason="no instructions for products of bytes")
def test_products_of_bytes_are_near(monkeypatch):
    """Directions are rounded, but not those of large codes."""
    made, given = transform(), entries()
    for nbytes, least, most in ((2500, 1e-4, 0.2), (10**6, 0, 1e-6)):
        coded = encode(given, made, "joint", nbytes)
        found = []
        for can in (True, False):
            monkeypatch.setattr(products, "available", lambda can=can: can)
            found.append(torch.cat(decode(coded, made, "joint", counts(given))))
        near, exact = found
        error = float((exact - torch.cat(given)).norm())
        assert least * error <= float((near - exact).norm()) < most * max(error, 1)
