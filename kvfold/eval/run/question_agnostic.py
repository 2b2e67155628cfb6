# SPDX-License-Identifier: Apache-2.0
"""Question-agnostic runs: the context is compressed before any question is known."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from transformers import PreTrainedModel

from kvfold.bench.clock import synchronize
from kvfold.cache.fork import fork
from kvfold.contexts.answer import end_tokens
from kvfold.contexts.chat import Chat
from kvfold.eval.run.budgets import compressed
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.likelihood import at_once
from kvfold.eval.run.outcome import cache_usage, scored_answer
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.sample_result import SampleOutcome, ScoredAnswer
from kvfold.eval.tasks import Task


def run_question_agnostic(
    model: PreTrainedModel, prompt: SamplePrompt, cells: Sequence[EvalCell], task: Task
) -> Iterator[tuple[EvalCell, SampleOutcome]]:
    """Outcomes of cells that differ only in their budget; one compression serves all questions."""
    sample, first = prompt.sample, cells[0]
    by_budget = {cell.budget: cell for cell in cells}
    seed = first.seed + sample.index
    for each in compressed(model, prompt, first.method, list(by_budget), seed):
        # Measured first: questions grow the buffers.
        before, began = cache_usage(each.context.stats()), time.perf_counter()
        if task.by_likelihood:
            text = prompt.question_ids(sample.questions[0]).to(model.device)
            answers = [ScoredAnswer.of_text(at_once(model, fork(each.context.cache), text))]
        else:
            answers = _asked(model, each.context.chat(), prompt, task, first.protocol.history)
        synchronize(model.device)
        outcome = SampleOutcome(
            answers=tuple(answers),
            tokens=prompt.tokens,
            left_out=prompt.left_out,
            held=before,
            prefill_seconds=each.seconds,
            answer_seconds=time.perf_counter() - began,
        )
        yield by_budget[each.budget], outcome


def _asked(
    model: PreTrainedModel, chat: Chat, prompt: SamplePrompt, task: Task, history: str
) -> list[ScoredAnswer]:
    """Answers to all questions; in a conversation each sees the turns before it.

    Special tokens spelt in a question become special tokens, as in the benchmarks' own code.
    """
    sample, options, answers = prompt.sample, prompt.options(end_tokens(model)), []
    for question in sample.questions:
        reply = chat.reply(
            question.text,
            keep=sample.conversation and history == "own",
            answer_prefix=question.answer_prefix,
            max_new_tokens=question.max_new_tokens,
            stop=sample.stop,
            special_tokens=True,
            **options,
        )
        if sample.conversation and history == "gold":
            chat.add(
                question.text,
                question.answers[0],
                answer_prefix=question.answer_prefix,
                special_tokens=True,
            )
        answers.append(scored_answer(task, question, reply))
    return answers
