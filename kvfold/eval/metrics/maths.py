# SPDX-License-Identifier: Apache-2.0
"""Metrics of GSM8K and MATH-500: the number or expression at the end of a worked answer.

Source: openai/grade-school-math `grade_school_math/dataset.py` (strict), lm-evaluation-harness
`lm_eval/tasks/gsm8k/gsm8k.yaml` (flexible), math-verify (MATH; Hendrycks et al., 2021,
arXiv 2103.03874).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from kvfold.eval.metrics.base import MetricScore, library

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
SECONDS_PER_EXPRESSION = 5
# Time for a child process to start and import sympy.
SECONDS_TO_START = 60


def gsm8k_strict(prediction: str, answer: str) -> MetricScore:
    """1 if the number after "####" is the answer, commas ignored.

    As in the official code, "#### 5." is not 5; lm-evaluation-harness also drops a full stop.
    """
    found = STRICT.search(prediction)
    if found is None:
        return MetricScore(0.0, 'no "####" and number in the prediction')
    return MetricScore(float(found.group(1).replace(",", "") == answer.replace(",", "")))


def gsm8k_flexible(prediction: str, answer: str) -> MetricScore:
    """1 if the last number of the prediction is the answer."""
    numbers = NUMBER.findall(prediction)
    if not numbers:
        return MetricScore(0.0, "no number in the prediction")
    return MetricScore(float(_plain(numbers[-1]) == _plain(answer)))


def _plain(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "").removesuffix(".")


def boxed(text: str) -> str | None:
    """Content of the last `\\boxed{}` with balanced braces; None without one."""
    for opening in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth = 1
        for place in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[opening.end() : place]
    return None


def equivalent(prediction: str, answer: str, limit: int = SECONDS_PER_EXPRESSION) -> MetricScore:
    """1 if the last `\\boxed{}` equals the answer by math-verify ("1/2" equals "\\frac12").

    `limit` bounds the seconds of parsing one expression, and of comparing one pair of them. Raises
    KvfoldError without the library.
    """
    written = boxed(prediction)
    if written is None:
        return MetricScore(0.0, "no complete \\boxed{} in the prediction")
    library("math_verify")
    # math-verify sets its time limits by signals, which only the main thread may do.
    if threading.current_thread() is threading.main_thread():
        return _compared(written, answer, limit)
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps([written, answer, limit]),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            timeout=3 * limit + SECONDS_TO_START,
            capture_output=True,
            check=True,
            text=True,
        )
        return MetricScore(**json.loads(done.stdout))
    except (subprocess.SubprocessError, ValueError) as problem:
        return MetricScore(0.0, f"math-verify: {type(problem).__name__}")


def _compared(written: str, answer: str, limit: int) -> MetricScore:
    """Score of the expression `written` against `answer`; by text if either cannot be parsed.

    A comparison that runs out of time, or fails otherwise, is a counted failure.
    """
    math_verify = library("math_verify")
    gold, parsed = (_expressions(text, limit) for text in (answer, written))
    if not gold or not parsed:
        unread = written if gold else answer
        return MetricScore(
            float(written.strip() == answer.strip()), f"math-verify cannot read {unread!r}"
        )
    # One pair at a time: the texts may be equal where comparing the expressions has failed.
    problem = None
    for pair in itertools.product(gold, parsed):
        try:
            with _given_up_after(limit + 1):
                if math_verify.verify(*pair, timeout_seconds=limit, raise_on_error=True):
                    return MetricScore(1.0)
        except (Exception, library("math_verify.errors").TimeoutException) as error:
            problem = f"math-verify: {type(error).__name__}"
    return MetricScore(0.0, problem)


def _expressions(text: str, limit: int) -> list[Any]:
    """Expressions that math-verify reads in a box of `text`; none if that takes too long."""
    try:
        with _given_up_after(limit + 1):
            found: list[Any] = library("math_verify").parse(
                f"\\boxed{{{text}}}", parsing_timeout=limit
            )
            return found
    except library("math_verify.errors").TimeoutException:
        return []


@contextmanager
def _given_up_after(seconds: float) -> Iterator[None]:
    """Raises TimeoutException after so many seconds of work, and every second until it is heard.

    math-verify raises it once, which is lost where a finalizer runs or sympy catches everything.
    """
    if sys.platform == "win32":  # there it compares in a process of its own
        yield
        return

    def give_up(*_: object) -> None:
        raise library("math_verify.errors").TimeoutException

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)


if __name__ == "__main__":
    print(json.dumps(asdict(_compared(*json.load(sys.stdin)))))
