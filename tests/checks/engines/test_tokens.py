# SPDX-License-Identifier: Apache-2.0
"""Tokens of an answer; the coarse KL never exceeds the true one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvfold.checks.engines.tokens import TopTokens, kl_at_least
from kvfold.errors import KvfoldError
from tests.helpers.stub_endpoint import completion

LOGITS = arrays(np.float64, 30, elements=st.floats(-25, 25))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


@given(LOGITS, LOGITS, st.integers(1, 20), st.integers(1, 20))
def test_the_lower_bound_is_never_above_the_true_kl(
    one: np.ndarray, other: np.ndarray, ours: int, theirs: int
) -> None:
    p, q = softmax(one), softmax(other)
    both = set(np.argsort(-p)[:ours]) & set(np.argsort(-q)[:theirs])
    true = float((p * (np.log(p) - np.log(q))).sum())
    for listed in (both, set(np.argsort(-q)[:theirs])):
        bound = kl_at_least([(p[each], q[each]) for each in listed])
        assert 0 <= bound <= true + 1e-9


def test_the_bound_of_known_distributions_is_that_of_the_joined_events() -> None:
    expected = 0.5 * np.log(0.5 / 0.25) + 0.2 * np.log(0.2 / 0.5) + 0.3 * np.log(0.3 / 0.25)
    assert kl_at_least([(0.5, 0.25), (0.2, 0.5)]) == pytest.approx(expected, rel=1e-12)
    whole = 0.6 * np.log(0.6 / 0.3) + 0.4 * np.log(0.4 / 0.7)
    assert kl_at_least([(0.6, 0.3), (0.4, 0.7 + 1e-8)]) <= whole + 1e-6
    assert kl_at_least([]) == 0 == kl_at_least([(1.0, 0.0)])


def test_tokens_that_look_alike_are_left_out() -> None:
    answer = completion({"a": 0.5, "�": 0.2, "": 0.1, "b": 0.05}, 20)
    listed = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    listed.append({"token": "b", "logprob": -4.0, "bytes": None})
    found = TopTokens.of(answer, "u")
    assert found.probabilities == {b"a": pytest.approx(0.5)}
    assert found.first == b"a" and found.read == 7
    assert TopTokens.of(completion({"�": 0.9, "a": 0.1}, 2, None), "u").first is None
    listed[0] |= {"token": "\ud83d", "bytes": None}
    assert TopTokens.of(answer, "u").probabilities == {}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": [{"logprobs": None}]}, "gives no log probabilities"),
        ([], "gives no log probabilities"),
        (completion({"a": 0.9, "b": 0.9}, 2), "sum is 1.8, above 1"),
        (completion({"a": float("nan")}, 2), "no numbers"),
        (completion({"a": 1e-300, "b": 1e-300}, 2), "are all 0"),
    ],
)
def test_answers_without_a_distribution_are_refused(answer: object, message: str) -> None:
    with pytest.raises(KvfoldError, match=message):
        TopTokens.of(answer, "u")
