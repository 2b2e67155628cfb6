# SPDX-License-Identifier: Apache-2.0
"""Evaluation cells: task, method, budget, and the protocol of the run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel
from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.hf.attention import attention_name
from kvfold.hf.identity import answering, model_header

# Baselines that are evaluated with every method.
RANDOM, SINKS_AND_RECENT, TRUNCATED, FULL = "random", "streaming_llm", "cut", "full"


class EvaluatedModel(BaseModel, frozen=True):
    """The evaluated model; `config`, `weights` and `vocabulary` are hashes.

    `answering` is one of RoPE, generation settings and chat template; None in older records.
    """

    name: str
    config: str
    weights: str
    vocabulary: str
    dtype: str
    attention: str
    answering: str | None = None

    @classmethod
    def of(cls, name: str, model: PreTrainedModel, tokenizer: Any) -> EvaluatedModel:
        """The subject for a model loaded under `name`."""
        part = model_header(model, tokenizer)
        return cls(
            name=name,
            config=part.config_hash,
            weights=part.weights,
            vocabulary=part.vocabulary,
            dtype=str(model.dtype).removeprefix("torch."),
            attention=attention_name(model),
            answering=answering(model, tokenizer),
        )


class EvalProtocol(BaseModel, frozen=True):
    """Protocol of a run.

    question_aware: if true, context and question are compressed together, once per question; else
        the context is compressed before any question is known.
    history: the answers that later turns of a conversation see, the model's own or the right ones
        ("gold").
    max_length: limit of prompt plus answer in tokens. Longer prompts are truncated in the middle
        if the benchmark does so, and are errors otherwise.
    answer_tokens: limit of an answer in tokens where the benchmark's own is higher, and in any case
        for tasks that compress while the answer is generated; None: the benchmark's own.
    """

    question_aware: bool = False
    history: Literal["own", "gold"] = "own"
    max_length: int
    answer_tokens: int | None = None


class EvalCell(BaseModel, frozen=True):
    """Key of a score. Samples with equal cells and numbers are the same sample.

    `length` is the token length of generated samples, None for a benchmark's own rows. `data` names
    the sources of the samples. The method "cut" is a full cache on a context truncated to the
    budget. `files` are digests of what the method reads, such as a fitted scorer, so that another
    file is another cell; records from before they were noted have none.
    """

    subject: EvaluatedModel
    task: str
    length: int | None
    seed: int
    data: tuple[str, ...]
    protocol: EvalProtocol
    method: str
    budget: str | None
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        length = "" if self.length is None else f" {self.length}"
        budget = "" if self.budget is None else f" {self.budget}"
        return f"{self.task}{length}, {self.method}{budget}"

    def budget_of(self, rows: int) -> Budget | None:
        """The budget of a batch of `rows` samples, each of which has this cell's."""
        return None if self.budget is None else Budget.of(self.budget).for_each(rows)

    @property
    def reference(self) -> EvalCell:
        """The cell of the full cache on the same samples."""
        return self.model_copy(update={"method": FULL, "budget": None, "files": ()})
