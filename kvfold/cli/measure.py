# SPDX-License-Identifier: Apache-2.0
"""Measurements of `kvfold demo`: answers, bytes and time, question-agnostic and -aware."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.cache.stats import Stats
from kvfold.contexts.context import Context
from kvfold.errors import KvfoldError
from kvfold.eval import short_ruler
from kvfold.eval.tasks.ruler_niah import split
from kvfold.generation.length import too_long
from kvfold.hf.chat_template import PromptFrame, token_count
from kvfold.hf.versions import CACHE
from kvfold.inspect.inspected_text import InspectedText, needles_in
from kvfold.measure.clock import seconds

WARM_UP, STEPS = 2, 8


@dataclass(frozen=True)
class Steps:
    """Decode steps of `rows` equal requests: bytes of all, seconds to read one, and of a step.

    `pace` is the step's time as a multiple of the full cache's, in turn with it.
    """

    stats: Stats
    reading: float
    seconds: float
    pace: float


@dataclass(frozen=True)
class DemoTrial:
    """A model, a document with needles, and one question per needle.

    `room` is the number of tokens to generate per answer.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sample: short_ruler.NeedleDocument
    room: int

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        needles: int,
        seed: int,
        book: str | None = None,
    ) -> DemoTrial:
        """A trial on `length` tokens: needles in a passage of `book`, or in noise.

        Raises KvfoldError for a length that cannot hold the needles, or that is too long for the
        model.
        """
        count = partial(token_count, tokenizer)
        haystack = short_ruler.NOISE if book is None else split(" ".join(book.split()))
        try:
            # Questions are drawn with replacement: this many draws cover every key.
            drawn = short_ruler.generate(
                "multikey",
                length,
                count,
                random.Random(seed),
                keys=needles,
                questions=30 * needles,
                haystack=haystack,
            )
        except ValueError as problem:
            raise KvfoldError(f"{problem}: give more --tokens") from problem
        questions = tuple(dict.fromkeys(drawn.questions))
        room = 4 + max(count(f"{q.prefix} {q.answers[0]}.") for q in questions)
        told = too_long(model, length + max(count(q.text) for q in questions) + room)
        if told is not None:
            raise KvfoldError(
                f"the document, a question and its answer have {told}: give fewer --tokens"
            )
        sample = short_ruler.NeedleDocument(drawn.task, drawn.document, questions)
        return cls(model, tokenizer, sample, room)

    def tokens(self) -> int:
        """Number of tokens of the document."""
        return token_count(self.tokenizer, self.sample.document)

    def compress(self, method: str, budget: str | None) -> Context:
        """The document compressed without a question."""
        return kvfold.compress(self.model, self.tokenizer, self.sample.document, method, budget)

    def question_unknown(self, method: str, budget: str | None) -> tuple[Context, list[str]]:
        """The document compressed once, and its answer to every question."""
        context = self.compress(method, budget)
        texts = [question.text for question in self.sample.questions]
        return context, [context.ask(text, max_new_tokens=self.room) for text in texts]

    def question_known(self, method: str, budget: str | None) -> list[str]:
        """Answers when a question is read with the document; it stays, as does the prefix."""
        frame = PromptFrame.of(self.tokenizer)
        before, answers = f"{frame.before}{self.sample.document}\n", []
        for question in self.sample.questions:
            text = f"{before}{question.text}{frame.after}"
            encoded = self.tokenizer(
                text + question.prefix, add_special_tokens=False, return_tensors="pt"
            )
            ids = encoded.input_ids.to(self.model.device)
            # KVzip scores by the repetition of all that is read, which has no need of a question.
            asked = token_count(self.tokenizer, before), ids.shape[1]
            produced = kvfold.generate(
                self.model,
                ids,
                cache=kvfold.CompressedCache(
                    self.model, method, budget, tokenizer=self.tokenizer, protect=[asked]
                ),
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.room,
                do_sample=False,
            )
            new = produced[0, ids.shape[1] :]
            answers.append(str(self.tokenizer.decode(new, skip_special_tokens=True)).strip())
        return answers

    def right(self, answers: Sequence[str]) -> list[bool]:
        """For each answer, True if it contains the number asked for."""
        pairs = zip(self.sample.questions, answers, strict=True)
        return [question.score(answer) == 1.0 for question, answer in pairs]

    def needles(self) -> list[tuple[int, int]]:
        """Spans `(start, stop)` of the needles' positions in the cache."""
        pieces = InspectedText.of(self.tokenizer, self.sample.document).pieces
        return [(start, stop) for start, stop, _ in needles_in(pieces)]

    def requests(self, method: str, budget: str | None, rows: int) -> Requests:
        """`rows` requests with this document, each with its own entries."""
        started = time.perf_counter()
        context = self.compress(method, budget)
        reading = time.perf_counter() - started
        context.cache.batch_repeat_interleave(rows)
        return Requests(context, rows, reading)


@dataclass(frozen=True)
class Requests:
    """A document's cache in `rows` equal rows; `reading` are the seconds that one took."""

    context: Context
    rows: int
    reading: float

    @torch.no_grad()
    def beside(self, full: Requests) -> Steps:
        """Medians of decode steps, in turn with those of `full`."""
        stats = self.context.stats()
        times = [(full.step(), self.step()) for _ in range(WARM_UP + STEPS)][WARM_UP:]
        own = statistics.median(mine for _, mine in times)
        pace = statistics.median(mine / other for other, mine in times)
        return Steps(stats, self.reading, own, pace)

    def step(self) -> float:
        """Seconds of one decode step."""
        model, cache = self.context.model, {CACHE: self.context.cache}
        token = torch.zeros(self.rows, 1, dtype=torch.long, device=model.device)
        return seconds(model.device, lambda: model(input_ids=token, use_cache=True, **cache))
