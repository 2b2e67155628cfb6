# SPDX-License-Identifier: Apache-2.0
"""What one method made of one sample: answers, scores, and what they took."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from kvfold.bench.machine import Setup
from kvfold.contexts.answer import Ended
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import Cell
from kvfold.eval.tasks import Record, Unreadable


class Answer(BaseModel):
    """One prediction and its scores in [0, 1], by name; the first metric is the task's.

    `ended` says why it is over: the model's end, a stop string, or `max_new_tokens`. `failed` says
    by metric why a prediction could not be parsed or scored; its score is then what the benchmark
    counts. `weight` is its share of the task's mean. Of a text that is read token by token, `nll`
    is the mean negative log-likelihood in nats, and `tokens` and `weight` count what was scored.
    """

    model_config = ConfigDict(frozen=True)

    prediction: str
    tokens: int
    ended: Ended
    scores: dict[str, float] = {}
    failed: dict[str, str] = {}
    weight: float = 1.0
    nll: float | None = None

    @classmethod
    def of_text(cls, nll: Tensor) -> Answer:
        """Of a text's tokens, by their negative log-likelihoods `[n]`.

        Raises KvfoldError where there are none, or where they are not finite.
        """
        count, mean = len(nll), float(nll.double().mean())
        if not math.isfinite(mean):
            raise KvfoldError(f"the mean log-likelihood of {count} tokens is {mean}")
        return cls(prediction="", tokens=count, ended="end", weight=count, nll=mean)


class Held(BaseModel):
    """What the cache held: after the compression, or after the answer where that is part of it.

    Of `seen` tokens; `kept` are entries stored over entries seen, all layers' and each layer's.
    `peak_bytes` is the most that was allocated beside the weights, on a GPU; None on a CPU, where
    `kvfold bench` measures it in a process of its own, and where a reading served more cells.
    """

    model_config = ConfigDict(frozen=True)

    seen: int
    kept: float
    kept_per_layer: tuple[float, ...]
    nbytes: int
    nbytes_full: int
    peak_bytes: int | None


class Outcome(BaseModel):
    """What came of a sample whose text could be read.

    `tokens` of context and first question were read, of which `left_out` were cut away before.
    `prefill_seconds` hold the compression.
    """

    model_config = ConfigDict(frozen=True)

    answers: tuple[Answer, ...]
    tokens: int
    left_out: int
    held: Held
    prefill_seconds: float
    answer_seconds: float


class Sample(BaseModel):
    """A line of the samples' file: one sample in one cell.

    `text` is a digest of what was read and asked, and of the right answers. `error` says why there
    is no outcome.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cell: Cell
    index: int
    text: str
    outcome: Outcome | None
    error: str | None
    metadata: dict[str, Any]
    at: str
    commit: str | None
    setup: Setup


def digest(sample: Record | Unreadable) -> str:
    """Tells samples apart that are drawn under the same number."""
    if isinstance(sample, Unreadable):
        said = sample.why
    else:
        asked = [(sample.prompt(question), question.answers) for question in sample.questions]
        said = repr((sample.context, asked))
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
