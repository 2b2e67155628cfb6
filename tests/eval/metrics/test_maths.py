# SPDX-License-Identifier: Apache-2.0
"""Numbers and expressions as answers: GSM8K and MATH."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from math_verify.errors import TimeoutException

from kvfold.eval.metrics import MetricScore, maths
from tests.helpers.metrics import value


@pytest.mark.parametrize(
    ("prediction", "strict", "flexible"),
    [
        ("so 9 * 2 = 18.\n#### 18", 1, 1),
        ("#### 1,800", 0, 0),
        # As the official code; lm-evaluation-harness drops the full stop.
        ("#### 18.", 0, 1),
        ("It makes $18.", None, 1),
        ("18 eggs, then 20", None, 0),
        ("many", None, None),
    ],
)
def test_gsm8k(prediction, strict, flexible):
    for metric, expected in ((maths.gsm8k_strict, strict), (maths.gsm8k_flexible, flexible)):
        scored = metric(prediction, "18")
        assert scored.value == (expected or 0)
        assert bool(scored.failed) == (expected is None)


def test_commas_in_numbers_are_ignored():
    assert value(maths.gsm8k_strict("#### 1,800", "1800")) == 1
    assert value(maths.gsm8k_flexible("in all $1,800.", "1,800")) == 1


def test_the_last_box_is_read_with_its_braces_balanced():
    assert maths.boxed("\\boxed{1} and \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert maths.boxed("\\boxed{1} then \\boxed{\\frac{1}{2}") == "1"
    assert maths.boxed("\\boxed{\\frac{1}") is None
    assert maths.boxed("1") is None


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}", 1),
        ("\\boxed{0.5}", "\\frac12", 1),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3, \\pi/2)", 1),
        ("\\boxed{x^2+2x}", "x(x+2)", 1),
        ("\\boxed{\\frac{1}{3}}", "\\frac{1}{2}", 0),
    ],
)
def test_math_answers_are_compared_as_expressions(prediction, answer, expected):
    assert value(maths.equivalent(prediction, answer)) == expected


@pytest.mark.slow
def test_expressions_that_never_end_are_given_up_outside_the_main_thread_too():
    with ThreadPoolExecutor(1) as thread:
        endless = thread.submit(maths.equivalent, "\\boxed{9^{9^{9^{9}}}}", "1", 1)
        assert endless.result(timeout=60).value == 0
        assert thread.submit(maths.equivalent, "\\boxed{0.5}", "\\frac12").result().value == 1


def test_a_comparison_that_fails_is_a_counted_failure(monkeypatch):
    from math_verify import grader

    def endless(*arguments):
        raise TimeoutException

    def overflowing(*arguments):
        raise OverflowError("too large")

    for fails, said in ((endless, "TimeoutException"), (overflowing, "OverflowError")):
        monkeypatch.setattr(grader, "sympy_expr_eq", fails)
        failed = MetricScore(0.0, f"math-verify: {said}")
        assert maths.equivalent("\\boxed{x^2}", "2 x") == failed
        # Equal texts are equal, whatever their expressions.
        assert maths.equivalent("\\boxed{x^2}", "x^2") == MetricScore(1.0)


@pytest.mark.slow
def test_a_comparison_that_never_ends_is_a_counted_failure():
    found = maths.equivalent("\\boxed{\\sum_{k=1}^{10^8} \\frac{1}{k^2+1}}", "\\frac{3}{7}", 1)
    assert found == MetricScore(0.0, "math-verify: TimeoutException")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "said"),
    [
        ("grader", "sympy_expr_eq", "math-verify: TimeoutException"),
        ("parser", "extract_target_from_pred", "math-verify cannot read '2 x'"),
    ],
)
def test_work_that_hears_no_alarm_is_given_up_too(monkeypatch, place, name, said):
    def deaf(*arguments, **options):
        with suppress(TimeoutException):
            while True:
                pass
        end = time.monotonic() + 30
        while time.monotonic() < end:
            pass

    monkeypatch.setattr(f"math_verify.{place}.{name}", deaf)
    assert maths.equivalent("\\boxed{x^2}", "2 x", 1) == MetricScore(0.0, said)


def test_math_without_a_box_is_a_counted_failure():
    assert maths.equivalent("It is 1/2.", "1/2") == MetricScore(
        0.0, "no complete \\boxed{} in the prediction"
    )
