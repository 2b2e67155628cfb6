# SPDX-License-Identifier: Apache-2.0
"""Question-agnostic runs: the context is compressed before any question is known."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.cache.fork import fork
from kvfold.contexts.answer import Reply, end_tokens
from kvfold.contexts.chat import Chat
from kvfold.contexts.context import Context, check_reusable
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.outcome import (
    BatchOutcome,
    attempt,
    batch_outcomes,
    cache_usage,
    scored_answer,
)
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.prompt_batch import PromptBatch, limits_of, replies
from kvfold.eval.run.sample_result import SampleOutcome, ScoredAnswer
from kvfold.eval.run.shared_reading import (
    Compressed,
    Reading,
    compressed,
    new_cache,
    reads_for_others,
)
from kvfold.eval.run.streaming import at_once
from kvfold.eval.tasks import Task
from kvfold.generation.reading import read_on, read_turn
from kvfold.measure.clock import synchronize
from kvfold.measure.cost import Cost, ForwardCost, measured
from kvfold.methods.base import parse


def run_question_agnostic(
    model: PreTrainedModel, prompts: Sequence[SamplePrompt], cells: Sequence[EvalCell], task: Task
) -> Iterator[tuple[EvalCell, BatchOutcome]]:
    """Outcomes of cells of one task on a batch of samples; one compression serves all questions."""
    batch = PromptBatch.of(prompts, model.device)
    for each in _compressed(model, batch, cells):
        yield each.cell, attempt(partial(_outcomes, model, each, task))


def _compressed(
    model: PreTrainedModel, batch: PromptBatch, cells: Sequence[EvalCell]
) -> Iterator[Compressed]:
    """Every cell's compressed contexts, from shared readings where that is exact."""

    def text(cache: CompressedCache) -> None:
        read_on(model, cache, batch.ids, batch.padding)

    def rest(cache: CompressedCache) -> PromptBatch:
        if not cache.get_seq_length():
            text(cache)
        return batch

    shared = [cell for cell in cells if reads_for_others(model, parse(cell.method))]
    yield from compressed(model, batch, shared, Reading(text, rest))
    for cell in (cell for cell in cells if cell not in shared):
        yield _read_alone(model, batch, cell)


def _read_alone(model: PreTrainedModel, batch: PromptBatch, cell: EvalCell) -> Compressed:
    """A cell's contexts from a reading of its own."""
    try:
        check_reusable(parse(cell.method))
        cache = new_cache(model, batch, cell)
        with measured(model.device) as cost:
            read_turn(model, cache, batch.ids, batch.padding)
        return Compressed(cell, cache, batch, cost)
    except Exception as problem:
        return Compressed(cell, problem.with_traceback(None), batch)


def _outcomes(model: PreTrainedModel, made: Compressed, task: Task) -> list[SampleOutcome]:
    """Outcomes of a cell, one per sample; raises what its compression raised."""
    if isinstance(made.cache, Exception):
        raise made.cache
    first, began = made.batch.prompts[0], time.perf_counter()
    # Measured first: questions grow the buffers.
    held, step = cache_usage(made.cache), None
    said, answers = list[list[Reply]](), list[list[ScoredAnswer]]()
    if task.by_likelihood:
        text = first.question_ids(first.sample.questions[0]).to(model.device)
        answers = [[ScoredAnswer.of_text(at_once(model, fork(made.cache), text))]]
    elif first.sample.conversation:
        context = Context(model, first.tokenizer, made.cache, first.frame, made.batch.ids)
        own, step = _conversation(context.chat(), first, made.cell.protocol.history)
        said = [own]
    else:
        said, step = _answers(model, made.cache, made.batch)
    synchronize(model.device)
    took = time.perf_counter() - began
    for prompt, own in zip(made.batch.prompts, said, strict=False):
        pairs = zip(prompt.sample.questions, own, strict=True)
        answers.append([scored_answer(task, *pair) for pair in pairs])
    return batch_outcomes(made.batch.prompts, answers, held, made.cost, took, step)


def _answers(
    model: PreTrainedModel, cache: CompressedCache, batch: PromptBatch
) -> tuple[list[list[Reply]], Cost | None]:
    """Answers `[sample][question]`, each to the context alone, and the cost of a step.

    Special tokens spelt in a question stay plain text.
    """
    found: list[list[Reply]] = [[] for _ in batch.prompts]
    step = None
    for number in range(len(batch.prompts[0].sample.questions)):
        asked, questions = batch.asking(number)
        said = replies(model, fork(cache), asked, asked, limits_of(questions))
        step = said.step or step
        for row, reply in enumerate(said.replies):
            found[row].append(reply)
    return found, step


def _conversation(
    chat: Chat, prompt: SamplePrompt, history: str
) -> tuple[list[Reply], Cost | None]:
    """Answers to all questions of a conversation, each of which sees the turns before it.

    With them the cost of the last decode step that was measured. Special tokens spelt in a question
    stay plain text.
    """
    model, answers, cost = chat.context.model, list[Reply](), None
    options = prompt.options(end_tokens(model))
    for question in prompt.sample.questions:
        with ForwardCost(model.device, token=1) as step:
            reply = chat.reply(
                question.text,
                keep=history == "own",
                answer_prefix=question.answer_prefix,
                max_new_tokens=question.max_new_tokens,
                stop=prompt.sample.stop,
                stopping_criteria=[step],
                **options,
            )
        cost = step.cost or cost
        if history == "gold":
            chat.add(question.text, question.answers[0], answer_prefix=question.answer_prefix)
        answers.append(reply)
    return answers, cost
