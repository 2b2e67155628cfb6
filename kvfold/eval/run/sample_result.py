# SPDX-License-Identifier: Apache-2.0
"""Lines of the samples file: answers, scores, cache usage and times of one sample in one cell."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from kvfold.contexts.answer import Ended
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.tasks import TaskSample, UnreadableSample
from kvfold.measure.machine import MachineSetup


class ScoredAnswer(BaseModel, frozen=True):
    """One prediction and its scores.

    tokens, ended: length of the prediction; its end by end token, stop string or `max_new_tokens`.
    scores: in [0, 1] by metric; the first metric is the task's.
    failed: by metric, why the prediction could not be parsed or scored; the score is then the
        benchmark's default.
    weight: weight in the task's mean.
    nll: mean negative log-likelihood in nats of a scored text, else None; `tokens` and `weight` are
        then the number of scored tokens.
    """

    prediction: str
    tokens: int
    ended: Ended
    scores: dict[str, float] = {}
    failed: dict[str, str] = {}
    weight: float = 1.0
    nll: float | None = None

    @classmethod
    def of_text(cls, nll: Tensor) -> ScoredAnswer:
        """The answer for a scored text with negative log-likelihoods `nll [n]` in nats.

        Raises KvfoldError if n is 0 or the mean is not finite.
        """
        count, mean = len(nll), float(nll.double().mean())
        if not math.isfinite(mean):
            raise KvfoldError(f"the mean log-likelihood of {count} tokens is {mean}")
        return cls(prediction="", tokens=count, ended="end", weight=count, nll=mean)


class CacheUsage(BaseModel, frozen=True):
    """Cache size after compression; after the answer in tasks that compress while they answer.

    seen: tokens seen.
    kept, kept_per_layer: entries stored over entries seen, of all layers and of each.
    nbytes, nbytes_full: bytes of this cache and of a full one.
    peak_bytes: peak GPU allocation without the weights; None on a CPU, and if one prefill served
        several cells.
    """

    seen: int
    kept: float
    kept_per_layer: tuple[float, ...]
    nbytes: int
    nbytes_full: int
    peak_bytes: int | None


class SampleOutcome(BaseModel, frozen=True):
    """Answers, cache usage and times of a sample that ran without error.

    `tokens` counts context and first question after truncation, `left_out` the truncated tokens.
    `prefill_seconds` includes compression, and so does `prefill_operations`, the additions and
    multiplications of matrix products; `step_operations` are those of one decode step. They are
    None where they were not counted: on a GPU, and where cells cannot share a prefill.
    """

    answers: tuple[ScoredAnswer, ...]
    tokens: int
    left_out: int
    held: CacheUsage
    prefill_seconds: float
    answer_seconds: float
    prefill_operations: float | None = None
    step_operations: float | None = None


class SampleResult(BaseModel, frozen=True, extra="forbid"):
    """One line of the samples file: sample number `index` in one cell.

    `text` is the sample's digest. `error` is the reason if there is no outcome. `at` is the UTC
    time of writing.
    """

    cell: EvalCell
    index: int
    text: str
    outcome: SampleOutcome | None
    error: str | None
    metadata: dict[str, Any]
    at: str
    commit: str | None
    setup: MachineSetup


def sample_digest(sample: TaskSample | UnreadableSample) -> str:
    """Hash of a sample's prompts and right answers, and of what else its rows and options say."""
    if isinstance(sample, UnreadableSample):
        said = sample.why
    else:
        asked = [(sample.prompt(question), question.answers) for question in sample.questions]
        more = [sorted(each.metadata.items()) for each in sample.questions if each.metadata]
        turns = ["conversation"] * sample.conversation
        # Published samples, most of which have neither, keep their hashes.
        said = repr((sample.context, asked, *more, *turns))
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
