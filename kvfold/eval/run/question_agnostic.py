# SPDX-License-Identifier: Apache-2.0
"""The context is compressed before any question exists (question-agnostic)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from transformers import PreTrainedModel

from kvfold.bench.clock import synchronize
from kvfold.cache.fork import fork
from kvfold.contexts.answer import end_tokens
from kvfold.contexts.chat import Chat
from kvfold.eval.run.budgets import compressed
from kvfold.eval.run.cell import Cell
from kvfold.eval.run.likelihood import at_once
from kvfold.eval.run.outcome import held, scored
from kvfold.eval.run.prompt import Prompt
from kvfold.eval.run.sample import Answer, Outcome
from kvfold.eval.tasks import Task


def apart(
    model: PreTrainedModel, prompt: Prompt, cells: Sequence[Cell], task: Task
) -> Iterator[tuple[Cell, Outcome]]:
    """Cells that differ in their budget, each with one compression for all questions."""
    record, first = prompt.record, cells[0]
    by_budget = {cell.budget: cell for cell in cells}
    seed = first.seed + record.index
    for each in compressed(model, prompt, first.method, list(by_budget), seed):
        # Before questions leave room for tokens behind.
        before, began = held(each.context.stats()), time.perf_counter()
        if task.by_likelihood:
            text = prompt.asked(record.questions[0]).to(model.device)
            answers = [Answer.of_text(at_once(model, fork(each.context.cache), text))]
        else:
            answers = _asked(model, each.context.chat(), prompt, task, first.protocol.history)
        synchronize(model.device)
        outcome = Outcome(
            answers=tuple(answers),
            tokens=prompt.tokens,
            left_out=prompt.left_out,
            held=before,
            prefill_seconds=each.seconds,
            answer_seconds=time.perf_counter() - began,
        )
        yield by_budget[each.budget], outcome


def _asked(
    model: PreTrainedModel, chat: Chat, prompt: Prompt, task: Task, history: str
) -> list[Answer]:
    """Every question's answer; each sees the turns before it where they are a conversation.

    A benchmark's text is tokenised as its own code does, special tokens and all.
    """
    record, options, answers = prompt.record, prompt.options(end_tokens(model)), []
    for question in record.questions:
        reply = chat.reply(
            question.text,
            keep=record.conversation and history == "own",
            answer_prefix=question.answer_prefix,
            max_new_tokens=question.max_new_tokens,
            stop=record.stop,
            special_tokens=True,
            **options,
        )
        if record.conversation and history == "gold":
            chat.add(
                question.text,
                question.answers[0],
                answer_prefix=question.answer_prefix,
                special_tokens=True,
            )
        answers.append(scored(task, question, reply))
    return answers
