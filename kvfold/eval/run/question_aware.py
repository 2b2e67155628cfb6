# SPDX-License-Identifier: Apache-2.0
"""Question-aware runs: context and question are compressed together, then generated tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Event
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache.cache import CompressedCache
from kvfold.contexts.answer import AnswerStream, end_tokens
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.outcome import cache_usage, scored_answer
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.sample_result import SampleOutcome, ScoredAnswer
from kvfold.eval.tasks import Task
from kvfold.generation.generate import generate


def run_question_aware(
    model: PreTrainedModel, prompt: SamplePrompt, cell: EvalCell, task: Task
) -> SampleOutcome:
    """Outcome of a sample: one prefill of context and question per question.

    The turns of a conversation share one cache. Raises KvfoldError for history "gold" in a
    conversation, as that cache holds the model's own answers; for tasks scored by likelihood; and
    without a question.
    """
    sample, ends, answers = prompt.sample, end_tokens(model), list[ScoredAnswer]()
    if sample.conversation and cell.protocol.history == "gold":
        raise KvfoldError(
            'a conversation in one cache goes on with the model\'s own answers: history "gold" '
            "needs a context that is compressed before the questions"
        )
    if task.by_likelihood:
        raise KvfoldError(
            "a continuation cannot be scored in a question-aware run: it would be compressed with "
            "its context"
        )
    ids, cache, prefill, total = prompt.ids, None, 0.0, 0.0
    for turn, question in enumerate(sample.questions):
        first = turn == 0 or not sample.conversation
        if cache is None or first:
            ids = prompt.ids
            cache = CompressedCache(
                model,
                cell.method,
                cell.budget,
                tokenizer=prompt.tokenizer,
                seed=cell.seed + sample.index,
            )
        ids = torch.cat([ids, prompt.question_ids(question, first)], 1)
        text = _TimedStop(prompt.tokenizer, ids.shape[1], sample.stop)
        began = time.perf_counter()
        out = generate(
            model,
            ids.to(model.device),
            cache=cache,
            attention_mask=torch.ones_like(ids).to(model.device),
            do_sample=False,
            max_new_tokens=question.max_new_tokens,
            stopping_criteria=[text],
            **prompt.options(ends),
        )
        total += time.perf_counter() - began
        prefill += text.first - began
        generated = out[0, ids.shape[1] :].tolist()
        text.finish(generated)
        answers.append(scored_answer(task, question, text.reply(generated, ends)))
        said = generated[:-1] if generated and generated[-1] in ends else generated
        ids = torch.cat([ids, torch.tensor([said], dtype=ids.dtype)], 1)
    if cache is None:
        raise KvfoldError("there is no question")
    return SampleOutcome(
        answers=tuple(answers),
        tokens=prompt.tokens,
        left_out=prompt.left_out,
        held=cache_usage(cache.stats()),
        prefill_seconds=prefill,
        answer_seconds=total - prefill,
    )


class _TimedStop(AnswerStream):
    """A stopping criterion that records the time of the first generated token."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: int, stop: Sequence[str]
    ) -> None:
        super().__init__(tokenizer, prompt, stop, lambda piece: None, Event())
        self.first = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.first = self.first or time.perf_counter()
        return super().__call__(input_ids, scores, **kwargs)
