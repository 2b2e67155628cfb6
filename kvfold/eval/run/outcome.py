# SPDX-License-Identifier: Apache-2.0
"""Parts of an outcome that all protocols share: scored answers and cache usage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvfold.cache.byte_count import nbytes_per_row
from kvfold.cache.cache import CompressedCache
from kvfold.contexts.answer import Reply
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.sample_result import CacheUsage, SampleOutcome, ScoredAnswer
from kvfold.eval.tasks import Question, Task
from kvfold.measure.cost import Cost

# Outcomes of a batch's samples, or the exception instead
BatchOutcome = list[SampleOutcome] | Exception


def attempt(work: Callable[[], list[SampleOutcome]]) -> BatchOutcome:
    """The outcomes, or the exception that was raised, so that other cells of a job go on.

    Its traceback is dropped, which would keep the batch's tensors.
    """
    try:
        return work()
    except Exception as problem:
        return problem.with_traceback(None)


def batch_outcomes(
    prompts: Sequence[SamplePrompt],
    answers: Sequence[Sequence[ScoredAnswer]],
    held: Sequence[CacheUsage],
    prefill: Cost,
    answer_seconds: float,
    step: Cost | None,
) -> list[SampleOutcome]:
    """Outcomes of a batch's samples, which share its costs equally."""
    rows = len(prompts)
    counted = None if step is None else step.operations
    return [
        SampleOutcome(
            answers=tuple(own),
            tokens=prompt.tokens,
            left_out=prompt.left_out,
            held=usage,
            prefill_seconds=prefill.seconds / rows,
            answer_seconds=answer_seconds / rows,
            prefill_operations=None if prefill.operations is None else prefill.operations / rows,
            step_operations=None if counted is None else counted / rows,
        )
        for prompt, own, usage in zip(prompts, answers, held, strict=True)
    ]


def scored_answer(task: Task, question: Question, reply: Reply) -> ScoredAnswer:
    """A reply with its scores by all of the task's metrics."""
    scores = {name: metric(reply.text, question) for name, metric in task.metrics.items()}
    return ScoredAnswer(
        prediction=reply.text,
        tokens=reply.tokens,
        ended=reply.ended,
        scores={name: each.value for name, each in scores.items()},
        failed={name: each.failed for name, each in scores.items() if each.failed},
        weight=scores[task.metric].weight if task.metric else 1.0,
    )


def cache_usage(cache: CompressedCache) -> list[CacheUsage]:
    """Current size of each row of a cache, as if it were alone in it."""
    found, stats, nbytes = [], cache.stats(), nbytes_per_row(cache)
    rows = len(nbytes)
    for row, seen in enumerate(stats.seen_per_row):
        kept = tuple(sum(layer[row]) / (seen * len(layer[row])) for layer in stats.kept)
        usage = CacheUsage(
            seen=seen,
            kept=sum(kept) / len(kept),
            kept_per_layer=kept,
            nbytes=nbytes[row],
            nbytes_full=round(stats.nbytes_full * seen / (rows * stats.seen)),
            peak_bytes=None,
        )
        found.append(usage)
    return found
