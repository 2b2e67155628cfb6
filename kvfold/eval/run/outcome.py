# SPDX-License-Identifier: Apache-2.0
"""What every way to read a sample writes down of it."""

from __future__ import annotations

from kvfold.cache.stats import Stats
from kvfold.contexts.answer import Reply
from kvfold.eval.run.sample import Answer, Held
from kvfold.eval.tasks import Question, Task


def scored(task: Task, question: Question, reply: Reply) -> Answer:
    """A reply with all of the task's scores."""
    scores = {name: metric(reply.text, question) for name, metric in task.metrics.items()}
    return Answer(
        prediction=reply.text,
        tokens=reply.tokens,
        ended=reply.ended,
        scores={name: each.value for name, each in scores.items()},
        failed={name: each.failed for name, each in scores.items() if each.failed},
        weight=scores[task.metric].weight if task.metric else 1.0,
    )


def held(stats: Stats) -> Held:
    """What a cache holds now."""
    seen = sum(stats.seen_per_row)
    return Held(
        seen=seen,
        kept=stats.kept_fraction,
        kept_per_layer=tuple(sum(map(sum, layer)) / (seen * len(layer[0])) for layer in stats.kept),
        nbytes=stats.nbytes,
        nbytes_full=stats.nbytes_full,
        peak_bytes=None,
    )
