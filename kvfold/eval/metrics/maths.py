# SPDX-License-Identifier: Apache-2.0
"""Numbers and expressions at the end of a worked answer: GSM8K and MATH-500.

Source: openai/grade-school-math `grade_school_math/dataset.py` (strict), lm-evaluation-harness
`lm_eval/tasks/gsm8k/gsm8k.yaml` (flexible), math-verify (MATH; Hendrycks et al., 2021,
arXiv 2103.03874).
"""

from __future__ import annotations

import re
import threading

from kvfold.eval.metrics.scored import Scored, library

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
SECONDS_PER_EXPRESSION = 5


def gsm8k_strict(prediction: str, answer: str) -> Scored:
    """The number after "####" is the answer, commas ignored."""
    found = STRICT.search(prediction)
    if found is None:
        return Scored(0.0, 'no "####" and number in the prediction')
    return Scored(float(_plain(found.group(1)) == _plain(answer)))


def gsm8k_flexible(prediction: str, answer: str) -> Scored:
    """The last number is the answer, however it is announced."""
    numbers = NUMBER.findall(prediction)
    if not numbers:
        return Scored(0.0, "no number in the prediction")
    return Scored(float(_plain(numbers[-1]) == _plain(answer)))


def _plain(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "").removesuffix(".")


def boxed(text: str) -> str | None:
    """What the last `\\boxed{}` holds, its braces balanced; None where none is complete."""
    for opening in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        depth = 1
        for place in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[opening.end() : place]
    return None


def equivalent(prediction: str, answer: str) -> Scored:
    """The last `\\boxed{}` equals the answer by math-verify, "1/2" as well as "\\frac12".

    Raises KvfoldError without the library.
    """
    written = boxed(prediction)
    if written is None:
        return Scored(0.0, "no complete \\boxed{} in the prediction")
    math_verify = library("math_verify")
    # Its time limits are signals, which only the main thread may set.
    main = threading.current_thread() is threading.main_thread()
    limit = SECONDS_PER_EXPRESSION if main else None
    gold, parsed = (
        math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=limit) for text in (answer, written)
    )
    if not gold or not parsed:
        unread = written if gold else answer
        return Scored(
            float(written.strip() == answer.strip()), f"math-verify cannot read {unread!r}"
        )
    return Scored(float(math_verify.verify(gold, parsed, timeout_seconds=limit)))
