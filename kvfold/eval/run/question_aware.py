# SPDX-License-Identifier: Apache-2.0
"""Question-aware runs: context and question are compressed together, then generated tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from threading import Event
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from kvfold.cache.cache import CompressedCache
from kvfold.contexts.answer import GREEDY, AnswerStream, NumbersOnly, Reply, end_tokens, without_end
from kvfold.contexts.chat import discard
from kvfold.errors import KvfoldError
from kvfold.eval.run.cell import EvalCell
from kvfold.eval.run.outcome import (
    BatchOutcome,
    attempt,
    batch_outcomes,
    cache_usage,
    scored_answer,
)
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.prompt_batch import (
    PromptBatch,
    all_but_last,
    first_token,
    limits_of,
    replies,
)
from kvfold.eval.run.sample_result import SampleOutcome, ScoredAnswer
from kvfold.eval.run.shared_reading import Compressed, Reading, compressed, reads_for_others
from kvfold.eval.tasks import Question, Task
from kvfold.generation.generate import generate
from kvfold.measure.clock import synchronize
from kvfold.measure.cost import Cost, ForwardCost
from kvfold.methods.base import parse


def run_question_aware(
    model: PreTrainedModel, prompts: Sequence[SamplePrompt], cells: Sequence[EvalCell], task: Task
) -> Iterator[tuple[EvalCell, BatchOutcome]]:
    """Outcomes of cells of one task on a batch of samples.

    Cells share one prefill of context and question, where that is exact; not in tasks and methods
    that compress while they answer, and not in conversations.
    """
    conversation = prompts[0].sample.conversation
    shared = [
        cell
        for cell in cells
        if not (conversation or task.by_likelihood or task.phase == "decode")
        and reads_for_others(model, parse(cell.method))
    ]
    if shared:
        yield from _from_shared_readings(model, prompts, shared, task)
    for cell in (cell for cell in cells if cell not in shared):
        work = partial(run_by_itself, model, cell=cell, task=task)
        yield cell, attempt(lambda: [work(prompt=prompt) for prompt in prompts])  # noqa: B023


def _from_shared_readings(
    model: PreTrainedModel, prompts: Sequence[SamplePrompt], cells: Sequence[EvalCell], task: Task
) -> Iterator[tuple[EvalCell, BatchOutcome]]:
    """Outcomes of cells that share the prefills; all samples have equally many questions."""
    parts: dict[EvalCell, list[list[SampleOutcome]]] = {}
    failed: dict[EvalCell, Exception] = {}
    for number in range(len(prompts[0].sample.questions)):
        questions = [prompt.sample.questions[number] for prompt in prompts]
        asked = PromptBatch.with_questions(prompts, questions, model.device)
        reading = Reading(
            text=partial(all_but_last, model, batch=asked),
            rest=partial(first_token, model, batch=asked),
        )
        left = [cell for cell in cells if cell not in failed]
        for each in compressed(model, asked, left, reading):
            outcome = attempt(partial(_one_question, model, each, asked, questions, task))
            if isinstance(outcome, Exception):
                failed[each.cell] = outcome
            else:
                parts.setdefault(each.cell, []).append(outcome)
    for cell in cells:
        if cell in failed:
            yield cell, failed[cell]
        else:
            yield cell, [_joined(questions) for questions in zip(*parts[cell], strict=True)]


def _one_question(
    model: PreTrainedModel,
    made: Compressed,
    asked: PromptBatch,
    questions: Sequence[Question],
    task: Task,
) -> list[SampleOutcome]:
    """Outcomes with one answer per sample; raises what the cell's compression raised."""
    if isinstance(made.cache, Exception):
        raise made.cache
    held, began = cache_usage(made.cache), time.perf_counter()
    said = replies(model, made.cache, asked, made.batch, limits_of(questions))
    synchronize(model.device)
    took = time.perf_counter() - began
    answers = [
        [scored_answer(task, question, reply)]
        for question, reply in zip(questions, said.replies, strict=True)
    ]
    return batch_outcomes(asked.prompts, answers, held, made.cost, took, said.step)


def _joined(questions: Sequence[SampleOutcome]) -> SampleOutcome:
    """A sample's outcome from those of its questions; cache usage is the last one's.

    So are the operations of a step, of those that are known.
    """
    counted = [each.prefill_operations for each in questions]
    steps = [each.step_operations for each in questions if each.step_operations is not None]
    update = {
        "step_operations": steps[-1] if steps else None,
        "prefill_operations": None if None in counted else sum(filter(None, counted)),
        "answers": tuple(answer for each in questions for answer in each.answers),
        "prefill_seconds": sum(each.prefill_seconds for each in questions),
        "answer_seconds": sum(each.answer_seconds for each in questions),
    }
    return questions[-1].model_copy(update=update)


def run_by_itself(
    model: PreTrainedModel, prompt: SamplePrompt, cell: EvalCell, task: Task
) -> SampleOutcome:
    """Outcome of a sample with prefills of its own: one of context and question per question.

    The turns of a conversation share one cache. Raises KvfoldError for history "gold" in a
    conversation, as that cache holds the model's own answers; for tasks scored by likelihood; and
    without a question.
    """
    sample, answers = prompt.sample, list[ScoredAnswer]()
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
    ids, cache, prefill, took, step = prompt.ids, None, Cost(0.0, 0), 0.0, None
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
        began = time.perf_counter()
        said = _answer(model, cache, prompt, ids, question.max_new_tokens)
        took += time.perf_counter() - began - said.prefill.seconds
        answers.append(scored_answer(task, question, said.reply))
        prefill, step = prefill + said.prefill, said.step or step
        ids = torch.cat([ids, torch.tensor([without_end(model, said.tokens)], dtype=ids.dtype)], 1)
    if cache is None:
        raise KvfoldError("there is no question")
    (outcome,) = batch_outcomes([prompt], [answers], cache_usage(cache), prefill, took, step)
    return outcome


class _MeasuredAnswer(NamedTuple):
    """A reply, its tokens, and what its prefill and a decode step cost, if there was one."""

    reply: Reply
    tokens: list[int]
    prefill: Cost
    step: Cost | None


def _answer(
    model: PreTrainedModel,
    cache: CompressedCache,
    prompt: SamplePrompt,
    ids: torch.Tensor,
    limit: int,
) -> _MeasuredAnswer:
    """A greedy answer to `ids [1, N]`, some of which the cache may hold."""
    ends, length = end_tokens(model), ids.shape[1]
    text = AnswerStream(prompt.tokenizer, length, prompt.sample.stop, discard, Event())
    device = model.device
    with ForwardCost(device, token=0) as prefill, ForwardCost(device, token=1) as step:
        out = generate(
            model,
            ids.to(device),
            cache=cache,
            attention_mask=torch.ones_like(ids).to(device),
            max_new_tokens=limit,
            stopping_criteria=[text, prefill, step],
            logits_processor=[NumbersOnly()],
            **GREEDY,
            **prompt.options(ends),
        )
    tokens = out[0, length:].tolist()
    text.finish(tokens)
    return _MeasuredAnswer(text.reply(tokens, ends), tokens, prefill.cost or Cost(), step.cost)
