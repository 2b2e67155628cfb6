# SPDX-License-Identifier: Apache-2.0
"""Data types of tasks: samples (a context and its questions), requests, and the task itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvfold.errors import KvfoldError
from kvfold.eval.metrics import MetricScore

Phase = Literal["prefill", "decode", "stream"]


@dataclass(frozen=True)
class Question:
    """A question and its right answers.

    text: the question, starting with its separator from the context.
    answers: right answers, as the metric takes them.
    max_new_tokens: the benchmark's limit for an answer.
    answer_prefix: first words of the answer, placed after the chat template's assistant header.
    metadata: further data for the metric.
    """

    text: str
    answers: tuple[str, ...]
    max_new_tokens: int
    answer_prefix: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskSample:
    """One sample: a context and the questions asked about it.

    chat: true if the benchmark puts its prompts into a chat template.
    stop: strings that end an answer.
    nonempty: if true, the first token may not end the answer (LongBench's `min_length` of samsum).
    conversation: if true, each question sees the turns before it; else the context alone.
    """

    task: str
    index: int
    context: str
    questions: tuple[Question, ...]
    chat: bool = True
    stop: tuple[str, ...] = ()
    nonempty: bool = False
    conversation: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, question: Question) -> str:
        """The benchmark's whole prompt, byte for byte, without a chat template."""
        return self.context + question.text + question.answer_prefix

    def with_answers_within(self, tokens: int | None, longer: bool = False) -> TaskSample:
        """The sample with answers of at most so many tokens; None changes nothing.

        With `longer`, also where the benchmark's limit is lower.
        """
        if tokens is None:
            return self
        limited = (
            replace(each, max_new_tokens=tokens if longer else min(each.max_new_tokens, tokens))
            for each in self.questions
        )
        return replace(self, questions=tuple(limited))


@dataclass(frozen=True)
class UnreadableSample:
    """A sample that could not be read: file and line, and the reason."""

    where: str
    why: str


# Samples of a task in their order, unreadable ones among them.
Samples = Iterator[TaskSample | UnreadableSample]


@dataclass(frozen=True)
class SampleRequest:
    """Options for drawing samples.

    samples, seed: number of samples (None: all, or the task's default), and the random seed.
    length: tokens of prompt plus answer of generated samples, as RULER counts.
    count: the tokenizer's function from a text to its number of tokens.
    data: a JSONL file, a folder of them, or a hub dataset's name.
    haystack: a text file or a folder of them; by default looked up in the folder `data`.
    words: a folder of word lists.
    shots: a JSONL file of solved examples.
    questions: questions per context, for generated tasks with a shared context.
    conversation: if true, SCBench's questions are turns of one conversation.
    depths: number of needle depths.
    """

    samples: int | None = None
    seed: int = 0
    length: int = 4096
    count: Callable[[str], int] | None = None
    data: str | None = None
    haystack: Path | None = None
    words: Path | None = None
    shots: Path | None = None
    questions: int = 4
    conversation: bool = False
    depths: int = 11

    def counter(self) -> Callable[[str], int]:
        """The function `count`; raises KvfoldError if none was given."""
        if self.count is None:
            raise KvfoldError("generated tasks need count=, a text's number of tokens")
        return self.count


class NoData(KvfoldError):
    """Error: the data of a task is missing.

    `wanted` is the file expected in a folder of data, or another description; `hub` the name of a
    hub dataset; `where` the path that was searched, None if no data was given.
    """

    def __init__(
        self, said: str, wanted: str, hub: str | None = None, where: Path | None = None
    ) -> None:
        super().__init__(said)
        self.wanted, self.hub, self.where = wanted, hub, where

    @classmethod
    def said(cls, name: str, missing: Sequence[NoData]) -> str:
        """One sentence on the data that all the tasks called `name` are missing."""
        first = missing[0]
        files = ", ".join(dict.fromkeys(each.wanted for each in missing))
        if first.where is not None:
            return f"{name}: {first.where.parent} has no {files}"
        offer = f", or the hub dataset {first.hub}" if first.hub else ""
        return f"{name} needs data, as --data: a folder with {files}{offer}"


# Draws a task's samples.
Draw = Callable[[SampleRequest], Samples]
# Scores a prediction for a question.
Metric = Callable[[str, Question], MetricScore]


def by_answers(metric: Callable[[str, Sequence[str]], MetricScore]) -> Metric:
    """A metric of a prediction and all right answers."""
    return lambda prediction, question: metric(prediction, question.answers)


def by_answer(metric: Callable[[str, str], MetricScore]) -> Metric:
    """A metric of a prediction and the first right answer."""
    return lambda prediction, question: metric(prediction, question.answers[0])


def by_note(name: str, metric: Callable[[str, Any], MetricScore]) -> Metric:
    """A metric of a prediction and what a question's metadata has under `name`."""
    return lambda prediction, question: metric(prediction, question.metadata[name])


@dataclass(frozen=True)
class Task:
    """A benchmark's task: the source of its samples and its metrics.

    benchmark, group: name of the benchmark; the skill that results are averaged by.
    metrics: by name; the first is the task's score. Empty for transcripts and perplexities.
    phase: when the cache is compressed: after the prompt ("prefill"), while the answer is generated
        ("decode"), or while a text is read token by token ("stream").
    truncation: the benchmark's rule for prompts that are too long; "none" makes them errors.
    generated: true if samples are generated rather than read.
    rows: name of the file whose rows are read instead of generated samples, where it is there.
    by_likelihood: true if the result is a perplexity, of the only question's text, or of the
        context if streamed.
    """

    name: str
    summary: str
    source: str
    benchmark: str
    group: str
    samples: Draw
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    phase: Phase = "prefill"
    truncation: Literal["none", "middle", "windows"] = "none"
    generated: bool = False
    rows: str = ""
    by_likelihood: bool = False

    @property
    def has_lengths(self) -> bool:
        """True if a run at another length is another cell: of generated samples, and streams."""
        return self.generated or self.phase == "stream"

    @property
    def metric(self) -> str | None:
        """Name of the task's score; None without metrics."""
        return next(iter(self.metrics), None)

    def score(self, prediction: str, question: Question) -> MetricScore:
        """The task's score of one prediction; raises KvfoldError if it has no metric."""
        if self.metric is None:
            raise KvfoldError(f"{self.name} has no metric")
        return self.metrics[self.metric](prediction, question)

    def missing_data(self, request: SampleRequest) -> NoData | None:
        """The error if `request` has no data for this task, else None; draws one sample."""
        if self.generated:
            return None
        try:
            next(iter(self.samples(replace(request, samples=1, count=request.count or len))), None)
        except NoData as missing:
            return missing
        except KvfoldError:
            # Reported when the samples are drawn.
            return None
        return None
