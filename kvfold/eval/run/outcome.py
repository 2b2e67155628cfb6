# SPDX-License-Identifier: Apache-2.0
"""Parts of an outcome that all protocols share: scored answers and cache usage."""

from __future__ import annotations

from kvfold.cache.stats import Stats
from kvfold.contexts.answer import Reply
from kvfold.eval.run.sample_result import CacheUsage, ScoredAnswer
from kvfold.eval.tasks import Question, Task


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


def cache_usage(stats: Stats) -> CacheUsage:
    """Current size of a cache."""
    seen = sum(stats.seen_per_row)
    return CacheUsage(
        seen=seen,
        kept=stats.kept_fraction,
        kept_per_layer=tuple(sum(map(sum, layer)) / (seen * len(layer[0])) for layer in stats.kept),
        nbytes=stats.nbytes,
        nbytes_full=stats.nbytes_full,
        peak_bytes=None,
    )
