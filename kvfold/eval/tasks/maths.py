# SPDX-License-Identifier: Apache-2.0
"""GSM8K and MATH-500: short problems, long answers, for compression while decoding.

Source: openai/grade-school-math @3101c7d (Cobbe et al., 2021, arXiv 2110.14168; the prompt is
lm-evaluation-harness's), openai/prm800k (Hendrycks et al., 2021, arXiv 2103.03874). Rows hold
`question` and `answer`, or `problem`, `answer`, `subject` and `level`. Compression tends to make
answers longer, so compare the number of answers that reach `max_new_tokens`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

from pydantic import Field

from kvfold.errors import KvfoldError
from kvfold.eval.metrics import maths as metrics
from kvfold.eval.tasks import source
from kvfold.eval.tasks.base import (
    Question,
    SampleRequest,
    Samples,
    Task,
    TaskSample,
    UnreadableSample,
    by_answer,
)

SHOTS = 5
MAX_NEW_TOKENS = {"gsm8k": 512, "math500": 2048}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


class _Gsm8kRow(source.DatasetRow):
    question: str = Field(min_length=1)
    answer: str


class _Math500Row(source.DatasetRow):
    problem: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    subject: str | None = None
    level: int | None = None


def _gsm8k_row(shots: str, row: _Gsm8kRow) -> TaskSample:
    found = metrics.STRICT.search(row.answer)
    if found is None:
        raise ValueError("field 'answer': no '####' and number")
    question = Question(
        f"Question: {row.question}",
        (found.group(1).replace(",", ""),),
        MAX_NEW_TOKENS["gsm8k"],
        "\nAnswer:",
    )
    # With solved examples the prompt is a document to continue, without a chat template.
    return TaskSample("gsm8k", 0, shots, (question,), chat=not shots, stop=("Question:",))


def _gsm8k(request: SampleRequest) -> Samples:
    shots = _solved(request) if request.shots else ""
    convert = partial(_gsm8k_row, shots)
    return source.samples(
        request, _Gsm8kRow, convert, file="gsm8k", hub="openai/gsm8k", subset="main"
    )


def _solved(request: SampleRequest) -> str:
    """The first `SHOTS` solved examples, the same for all questions; raises KvfoldError for a bad
    row."""
    examples = replace(request, data=str(request.shots), samples=SHOTS)

    def whole(row: _Gsm8kRow) -> TaskSample:
        return TaskSample("gsm8k", 0, f"Question: {row.question}\nAnswer: {row.answer}\n\n", ())

    parts = []
    for shot in itertools.islice(source.samples(examples, _Gsm8kRow, whole, file="gsm8k"), SHOTS):
        if isinstance(shot, UnreadableSample):
            raise KvfoldError(f"{shot.where}: {shot.why}")
        parts.append(shot.context)
    return "".join(parts)


def _math500_row(row: _Math500Row) -> TaskSample:
    question = Question(row.problem + BOXED, (row.answer,), MAX_NEW_TOKENS["math500"])
    metadata = {"subject": row.subject, "level": row.level}
    return TaskSample("math500", 0, "", (question,), metadata=metadata)


TASKS = (
    Task(
        "gsm8k",
        "grade-school word problems, solved ones in front with `shots`",
        "openai/grade-school-math, arXiv 2110.14168",
        "gsm8k",
        "maths",
        _gsm8k,
        {
            "last_number": by_answer(metrics.gsm8k_flexible),
            "strict_match": by_answer(metrics.gsm8k_strict),
        },
        phase="decode",
    ),
    Task(
        "math500",
        "competition problems, compared as expressions",
        "openai/prm800k, arXiv 2103.03874",
        "math500",
        "maths",
        source.rows_of(_Math500Row, _math500_row, "math500", "HuggingFaceH4/MATH-500"),
        {"math_verify": by_answer(metrics.equivalent)},
        phase="decode",
    ),
)
