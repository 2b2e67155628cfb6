# SPDX-License-Identifier: Apache-2.0
"""Cells and results of samples, made by hand."""

from __future__ import annotations

from kvfold.eval.run.cell import EvalCell, EvalProtocol, EvaluatedModel
from kvfold.eval.run.job import EvalJob
from kvfold.eval.run.sample_result import SampleOutcome, SampleResult, ScoredAnswer
from tests.helpers.evaluation import outcome, record

SUBJECT = EvaluatedModel(
    name="m", config="c", weights="w", vocabulary="v", dtype="d", attention="a"
)


def cell(task: str = "kv_retrieval", method: str = "full", budget: str | None = None) -> EvalCell:
    return EvalCell(
        subject=SUBJECT,
        task=task,
        length=None,
        seed=0,
        data=(),
        protocol=EvalProtocol(max_length=100),
        method=method,
        budget=budget,
    )


def lines(
    of: EvalCell, outcomes: list[SampleOutcome | str], **metadata: list
) -> list[SampleResult]:
    """A cell's samples; a text stands for an error."""
    found = []
    for index, one in enumerate(outcomes):
        known = {name: values[index] for name, values in metadata.items()}
        job = EvalJob({index: record(of.task, index=index, metadata=known)}, (of,))
        failed = isinstance(one, str)
        found.append(job.line(of, index, None if failed else one, one if failed else None))
    return found


def text(nll: float, tokens: int) -> SampleOutcome:
    """A hand-made outcome of a text of so many scored tokens."""
    answer = ScoredAnswer(prediction="", tokens=tokens, ended="end", weight=tokens, nll=nll)
    return outcome().model_copy(update={"answers": (answer,)})


def scored(*values: float, **fields) -> SampleOutcome:
    """An outcome with the metric that kv_retrieval is scored by."""
    made = outcome(*values, **fields)
    answers = [a.model_copy(update={"scores": {"substring": a.scores["m"]}}) for a in made.answers]
    return made.model_copy(update={"answers": tuple(answers)})
