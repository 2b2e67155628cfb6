# SPDX-License-Identifier: Apache-2.0
"""A cell of the evaluation: a task, a method, a budget, and the protocol they meet under."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedModel

from kvfold.contexts.files.identity import model_part
from kvfold.hf.attention import attention_name

# Beside every method: what a method must be better than.
RANDOM, SINKS_AND_RECENT, CUT, FULL = "random", "streaming_llm", "cut", "full"


class Subject(BaseModel):
    """The model that answers; `weights` and `config` are hashes."""

    model_config = ConfigDict(frozen=True)

    name: str
    config: str
    weights: str
    vocabulary: str
    dtype: str
    attention: str

    @classmethod
    def of(cls, name: str, model: PreTrainedModel, tokenizer: Any) -> Subject:
        """What `name` was loaded as."""
        part = model_part(model, tokenizer)
        return cls(
            name=name,
            config=part.config_hash,
            weights=part.weights,
            vocabulary=part.vocabulary,
            dtype=str(model.dtype).removeprefix("torch."),
            attention=attention_name(model),
        )


class Protocol(BaseModel):
    """How a sample is read and asked about.

    Without `question_aware` the context is compressed before any question exists; with it, context
    and question are compressed together, once for each question. `history` says whose answers the
    later turns of a conversation see: the model's own, or the right ones ("gold"). Prompts of more
    than `max_length` tokens, answer included, are cut in the middle where the benchmark does so,
    and are errors elsewhere.
    """

    model_config = ConfigDict(frozen=True)

    question_aware: bool = False
    history: Literal["own", "gold"] = "own"
    max_length: int


class Cell(BaseModel):
    """What a score belongs to: two samples of equal cells and numbers are the same sample.

    `length` is the tokens that a generated sample takes, None where rows come as they are. `data`
    names what samples were drawn from beside the seed. The method "cut" is a full cache on a
    context cut to the budget.
    """

    model_config = ConfigDict(frozen=True)

    subject: Subject
    task: str
    length: int | None
    seed: int
    data: tuple[str, ...]
    protocol: Protocol
    method: str
    budget: str | None

    def __str__(self) -> str:
        length = "" if self.length is None else f" {self.length}"
        budget = "" if self.budget is None else f" {self.budget}"
        return f"{self.task}{length}, {self.method}{budget}"

    @property
    def reference(self) -> Cell:
        """The full cache on the same samples."""
        return self.model_copy(update={"method": FULL, "budget": None})
