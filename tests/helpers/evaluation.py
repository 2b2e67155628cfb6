# SPDX-License-Identifier: Apache-2.0
"""A tiny evaluation: a random model that reads the bundled tokenizer's words, and samples of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import kvfold.bundled
from kvfold.cache.state import PER_ENTRY, PER_HEAD, PER_ROW
from kvfold.eval.run.cell import FULL, EvalCell, EvalProtocol, EvaluatedModel
from kvfold.eval.run.job import EvalJob, run_job
from kvfold.eval.run.plan import Contender, EvalPlan, TaskSamples
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.sample_result import CacheUsage, SampleOutcome, SampleResult, ScoredAnswer
from kvfold.eval.tasks import Question, SampleRequest, TaskSample, UnreadableSample, tasks
from tests.helpers.models import build

LIMIT = 4096
# What some metrics ask of a question.
PLAIN = {"classes": None, "needle": "none"}
HELD = CacheUsage(
    seen=100, kept=0.5, kept_per_layer=(0.4, 0.6), nbytes=10, nbytes_full=20, peak_bytes=None
)


def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(kvfold.bundled.FOLDER, local_files_only=True)


def tiny() -> PreTrainedModel:
    """Its answers are nonsense, but each depends on all that the model sees."""
    return build("llama", vocab_size=2048, num_hidden_layers=3)


@dataclass(frozen=True)
class Setting:
    """A model that evaluations use, and one that kvfold never touches."""

    model: PreTrainedModel
    plain: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def new(cls) -> Setting:
        return cls(tiny(), tiny(), tokenizer())

    @property
    def subject(self) -> EvaluatedModel:
        return EvaluatedModel.of("tiny", self.model, self.tokenizer)

    def cell(
        self, task: str, method: str = FULL, budget: str | None = None, **protocol: Any
    ) -> EvalCell:
        """A cell of crafted samples."""
        return EvalCell(
            subject=self.subject,
            task=task,
            length=None,
            seed=0,
            data=(),
            protocol=EvalProtocol(**{"max_length": LIMIT, **protocol}),
            method=method,
            budget=budget,
        )

    def run(self, sample: TaskSample | UnreadableSample, *cells: EvalCell) -> list[SampleResult]:
        return run_job(self.model, self.tokenizer, EvalJob(0, sample, cells))

    def outcome(
        self, record: TaskSample, method: str = FULL, budget: str | None = None, **how: Any
    ):
        """What comes of a sample that must not fail."""
        (sample,) = self.run(record, self.cell(record.task, method, budget, **how))
        assert sample.outcome is not None, sample.error
        return sample.outcome

    def error(self, record: TaskSample, method: str = FULL, budget: str | None = None, **how: Any):
        """What is said of a sample that must fail."""
        (sample,) = self.run(record, self.cell(record.task, method, budget, **how))
        assert sample.outcome is None and sample.error is not None
        return sample.error

    def plan(self, contenders: list[Contender], *wanted: TaskSamples) -> EvalPlan:
        return EvalPlan(wanted, self.subject, EvalProtocol(max_length=LIMIT), tuple(contenders))

    def prompt(self, record: TaskSample) -> SamplePrompt:
        return SamplePrompt.of(record, self.tokenizer)

    def ids(self, text: str) -> Tensor:
        """Tokens `[1, N]` of a text as it stands."""
        return torch.tensor([self.tokenizer(text, add_special_tokens=False).input_ids])

    def greedy(self, ids: Tensor, new: int) -> list[int]:
        """The tokens that transformers alone generates after `ids [1, N]`."""
        mask = torch.ones_like(ids)
        out = self.plain.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new)
        return out[0, ids.shape[1] :].tolist()

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def words(count: int, seed: int = 0) -> str:
    """Words that hardly repeat."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(100, 10_000, (count,), generator=generator).tolist()
    return " ".join(f"word {number}" for number in numbers)


def record(
    task: str = "kv_retrieval",
    questions: int = 1,
    *,
    count: int = 20,
    index: int = 0,
    new: int = 6,
    **fields: Any,
) -> TaskSample:
    """A sample with short answers."""
    asked = tuple(
        Question(f" Question {i}: {words(3, 10 + i)}?", (words(2, 90 + i),), new, " Answer:", PLAIN)
        for i in range(questions)
    )
    return replace(TaskSample(task, index, words(count, 100 + index), asked), **fields)


def wanted(samples: list[TaskSample | UnreadableSample]) -> TaskSamples:
    """Crafted samples of one task, as if they had been drawn."""
    named = next(sample.task for sample in samples if isinstance(sample, TaskSample))
    return TaskSamples(tasks()[named], None, SampleRequest(), tuple(samples))


def outcome(
    *scores: float, weights: tuple[float, ...] | None = None, **fields: Any
) -> SampleOutcome:
    """A hand-made outcome with one answer for each score of the metric "m"."""
    shares = weights or (1.0,) * len(scores)
    answers = tuple(
        ScoredAnswer(prediction="", tokens=1, ended="end", scores={"m": score}, weight=weight)
        for score, weight in zip(scores, shares, strict=True)
    )
    values = {"tokens": 10, "left_out": 0, "held": HELD, "prefill_seconds": 1, "answer_seconds": 1}
    return SampleOutcome(answers=answers, **{**values, **fields})


def contents(cache: kvfold.CompressedCache) -> list[dict[str, list[Tensor]]]:
    """Copies of all that each layer holds: entries, positions, and what was observed of them."""
    found = []
    for layer in cache.states:
        named = {name: [x.clone() for x in parts] for name, parts in layer.stored().named().items()}
        for name in (*PER_ENTRY, *PER_HEAD, *PER_ROW):
            if getattr(layer, name) is not None:
                named[name] = [getattr(layer, name).clone()]
        found.append(named)
    return found


def equal(one: list[dict[str, list[Tensor]]], other: list[dict[str, list[Tensor]]]) -> bool:
    """Whether two caches hold the same, bit by bit."""
    return len(one) == len(other) and all(
        a.keys() == b.keys()
        and all(
            len(a[name]) == len(b[name])
            and all(torch.equal(x, y) for x, y in zip(a[name], b[name], strict=True))
            for name in a
        )
        for a, b in zip(one, other, strict=True)
    )
