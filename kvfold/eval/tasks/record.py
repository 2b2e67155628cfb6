# SPDX-License-Identifier: Apache-2.0
"""What a task yields: a context that may be compressed before any question about it exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvfold.errors import KvfoldError
from kvfold.eval.metrics import Scored

Phase = Literal["prefill", "decode", "stream"]


@dataclass(frozen=True)
class Question:
    """What follows the context, how the answer starts, and what a right one holds.

    `text` begins with the white space that separates it from the context. `answer_prefix` goes
    after a chat template's assistant header. `max_new_tokens` are the benchmark's. `metadata`
    holds what its metric needs beyond `answers`.
    """

    text: str
    answers: tuple[str, ...]
    max_new_tokens: int
    answer_prefix: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskRecord:
    """One sample: a context and the questions asked about it.

    Each question sees the context alone, or with `conversation` the turns before it as well,
    whose own answers or the right ones the protocol chooses. `chat` says whether the benchmark
    puts its prompts into a chat template, `stop` what ends an answer; with `nonempty` nothing that
    ends one may be its first token (LongBench's `min_length` of samsum).
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


@dataclass(frozen=True)
class Unreadable:
    """A sample that could not be read: `where` names file and line, `why` what is wrong."""

    where: str
    why: str


@dataclass(frozen=True)
class Request:
    """Which samples are wanted, and from where.

    `length` is in tokens and holds prompt and answer, as RULER counts; `count` says how many
    tokens a text is. `data` is a JSONL file, a folder of them, or a hub dataset's name;
    `haystack` a text file or a folder of them, where `data` holds none; `words` a folder of word
    lists; `shots` a JSONL file of solved examples. `questions` are drawn per context where a task
    shares it; SCBench's are asked in one `conversation` or each on its own. `depths` is the number
    of places a needle is tried at.
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
        """`count`; raises KvfoldError where none was given."""
        if self.count is None:
            raise KvfoldError("generated tasks need count=, a text's number of tokens")
        return self.count


class NoData(KvfoldError):
    """Nothing to draw a task's samples from.

    `wanted` is the file that a folder of data would hold, or what else is read; `hub` a dataset's
    name; `where` the file that was looked for, None where no data was given.
    """

    def __init__(
        self, said: str, wanted: str, hub: str | None = None, where: Path | None = None
    ) -> None:
        super().__init__(said)
        self.wanted, self.hub, self.where = wanted, hub, where

    @classmethod
    def said(cls, name: str, missing: Sequence[NoData]) -> str:
        """What all of a benchmark's tasks are missing, in one sentence."""
        first = missing[0]
        files = ", ".join(dict.fromkeys(each.wanted for each in missing))
        if first.where is not None:
            return f"{name}: {first.where.parent} has no {files}"
        offer = f", or the hub dataset {first.hub}" if first.hub else ""
        return f"{name} needs data, as --data: a folder with {files}{offer}"


Metric = Callable[[str, Question], Scored]


@dataclass(frozen=True)
class Task:
    """A benchmark's task: where its records come from and how predictions are scored.

    `metrics` are named, the first one is the task's score; there is none where a transcript or
    a perplexity is the result: `by_likelihood`, of the one question's text, or of the context as it
    is streamed. `phase` says what compression does to it: the prompt's (prefill),
    the answer's own cache (decode), or token by token (stream). `truncation` names the
    benchmark's rule for prompts that are too long; "none" forbids it. `group` is the skill that
    results are averaged by.
    """

    name: str
    summary: str
    source: str
    benchmark: str
    group: str
    records: Callable[[Request], Iterator[TaskRecord | Unreadable]]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    phase: Phase = "prefill"
    truncation: Literal["none", "middle", "windows"] = "none"
    generated: bool = False
    by_likelihood: bool = False

    @property
    def metric(self) -> str | None:
        """The name of the metric that is the task's score."""
        return next(iter(self.metrics), None)

    def score(self, prediction: str, question: Question) -> Scored:
        """The task's score of one prediction; raises KvfoldError where it has no metric."""
        if self.metric is None:
            raise KvfoldError(f"{self.name} has no metric")
        return self.metrics[self.metric](prediction, question)

    def missing_data(self, request: Request) -> NoData | None:
        """What `request` lacks for this task's samples, if anything; none are generated for it."""
        if self.generated:
            return None
        try:
            next(iter(self.records(replace(request, samples=1, count=request.count or len))), None)
        except NoData as missing:
            return missing
        except KvfoldError:
            # Said where the samples are drawn.
            return None
        return None
