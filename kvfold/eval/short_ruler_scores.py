# SPDX-License-Identifier: Apache-2.0
"""Scores of a method on short RULER tasks, question-aware or question-agnostic."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.budget import Budget
from kvfold.cache.cache import CompressedCache
from kvfold.eval import short_ruler
from kvfold.eval.tasks.vocabulary import BUNDLED, Vocabulary
from kvfold.generation.generate import generate
from kvfold.generation.reading import read_turn
from kvfold.hf.chat_template import PromptFrame, token_count, token_ids
from kvfold.methods.base import Method

# RULER generates 128 tokens; with the bundled vocabulary the longest answer takes fewer than 48.
NEW_TOKENS = 48


@dataclass(frozen=True)
class RetrievalTrial:
    """One method at one budget on one task, at `length` tokens of document.

    `question_aware` compresses document and question together; `keys` overrides the number of
    needles.
    """

    task: str
    length: int
    method: Method | str = "full"
    budget: Budget | float | str | None = None
    question_aware: bool = True
    keys: int | None = None


@dataclass(frozen=True)
class RetrievalScore:
    """A sample's score in [0, 1], and the fractions of entries and of bytes kept.

    The fractions are taken after compression, or after the answer if `question_aware`.
    """

    score: float
    kept: float
    bytes: float


def retrieval_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trial: RetrievalTrial,
    samples: int,
    seed: int = 0,
    vocabulary: Vocabulary = BUNDLED,
) -> Iterator[RetrievalScore]:
    """Scores of `samples` generated samples, which depend on `seed`, task and length only.

    Keys are made of words of `vocabulary`. Raises ValueError for an unknown task or a length that
    cannot hold the needles.
    """
    rng = random.Random(f"{seed} {trial.task} {trial.length}")
    frame = PromptFrame.of(tokenizer)
    count = partial(token_count, tokenizer)
    for _ in range(samples):
        sample = short_ruler.generate(
            trial.task, trial.length, count, rng, keys=trial.keys, vocabulary=vocabulary
        )
        yield _score(model, tokenizer, trial, sample, frame)


def _score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trial: RetrievalTrial,
    sample: short_ruler.NeedleDocument,
    frame: PromptFrame,
) -> RetrievalScore:
    """Score of one sample: greedy answer from the compressed cache, then the cache's statistics."""
    question = sample.questions[0]
    cache = CompressedCache(model, trial.method, trial.budget, tokenizer=tokenizer)
    document = token_ids(tokenizer, frame.before + sample.document)
    ending = token_ids(tokenizer, f"\n{question.text}{frame.after}{question.prefix}")
    document, ids = (x.to(model.device) for x in (document, torch.cat([document, ending], 1)))
    stats = None
    if not trial.question_aware:
        read_turn(model, cache, document)
        stats = cache.stats()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    with nullcontext() if trial.question_aware else cache.frozen():
        out = generate(model, ids, cache=cache, attention_mask=torch.ones_like(ids), **options)
    answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    stats = stats or cache.stats()
    return RetrievalScore(question.score(str(answer)), stats.kept_fraction, stats.ratio)
