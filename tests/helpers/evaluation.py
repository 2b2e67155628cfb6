# SPDX-License-Identifier: Apache-2.0
"""A tiny evaluation: a random model that reads the bundled tokenizer's words, and samples of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from typer.testing import CliRunner, Result

import kvfold
import kvfold.bundled
from kvfold.cache.fork import fork
from kvfold.cache.state import PER_HEAD, PER_ROW
from kvfold.cli import app
from kvfold.eval.run import question_agnostic as agnostic
from kvfold.eval.run.cell import FULL, EvalCell, EvalProtocol, EvaluatedModel
from kvfold.eval.run.job import EvalJob, run_job, worker_spec
from kvfold.eval.run.plan import Contender, EvalPlan, TaskSamples
from kvfold.eval.run.prompt import SamplePrompt
from kvfold.eval.run.run_folder import run_missing, samples_file, summarize
from kvfold.eval.run.sample_result import CacheUsage, SampleOutcome, SampleResult, ScoredAnswer
from kvfold.eval.tasks import Question, SampleRequest, TaskSample, UnreadableSample, tasks
from kvfold.jobs.executor import here
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
        return self.lines(EvalJob({0: sample}, cells))

    def lines(self, job: EvalJob) -> list[SampleResult]:
        """All lines of a job, in the order of its cells."""
        found = [line for lines in run_job(self.model, self.tokenizer, job) for line in lines]
        return sorted(found, key=lambda line: job.cells.index(line.cell))

    def outcome(
        self, record: TaskSample, method: str = FULL, budget: str | None = None, **how: Any
    ):
        """What comes of a sample that must not fail."""
        return self.outcome_in(record, self.cell(record.task, method, budget, **how))

    def outcome_in(self, record: TaskSample, cell: EvalCell) -> SampleOutcome:
        """What comes of a sample in a cell that must not fail."""
        (sample,) = self.run(record, cell)
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
        scores_text = tasks()[record.task].by_likelihood
        return SamplePrompt.of(record, self.tokenizer, always_bos=scores_text)

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
        for name, (numbers, _) in layer.observers.numbers().items():
            named[name] = [numbers.clone()]
        named |= {name: [report.clone()] for name, report in layer.reports.items()}
        for name in (*PER_HEAD, *PER_ROW):
            if getattr(layer, name) is not None:
                named[name] = [getattr(layer, name).clone()]
        found.append(named)
    return found


def equal(
    one: list[dict[str, list[Tensor]]],
    other: list[dict[str, list[Tensor]]],
    alike: Callable[[Tensor, Tensor], bool] = torch.equal,
) -> bool:
    """Whether two caches hold the same, bit by bit unless tensors are compared otherwise."""
    return len(one) == len(other) and all(
        a.keys() == b.keys()
        and all(
            len(a[name]) == len(b[name])
            and all(alike(x, y) for x, y in zip(a[name], b[name], strict=True))
            for name in a
        )
        for a, b in zip(one, other, strict=True)
    )


def rounded_alike(one: Tensor, other: Tensor) -> bool:
    """Whether floats are equal up to rounding, and all else exactly."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-4)


FEW: list[Contender] = [("full", None), ("knorm", "0.5"), ("knorm", "0.25")]


def by_itself(setting: Setting):
    """Workers that are this process."""
    return here(worker_spec("tiny"), setting.model, setting.tokenizer)


def without_times(samples: Iterable[SampleResult]) -> list[dict[str, Any]]:
    """Lines by cell and sample: failed ones are run again first, so that their order differs."""
    times = {"outcome": {"prefill_seconds", "answer_seconds"}, "at": True, "setup": {"threads"}}
    ordered = sorted(samples, key=lambda sample: (str(sample.cell), sample.index))
    return [sample.model_dump(exclude=times) for sample in ordered]


def records(samples: list[SampleResult]) -> list[dict[str, Any]]:
    times = {"prefill_seconds", "seconds_per_token", "setups"}
    return [each.model_dump(exclude=times) for each in summarize(samples)]


def finish(setting: Setting, plan: EvalPlan, out: Path) -> list[SampleResult]:
    """All samples of a folder, after what was missing was run here."""
    out.mkdir(exist_ok=True)
    counts = list(run_missing(plan, samples_file(out), by_itself(setting)))
    assert counts == sorted(counts) and counts[-1] == plan.total
    return samples_file(out).load().records


def count(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def jobs(setting: Setting, count: int = 6) -> list[EvalJob]:
    return list(setting.plan(FEW, wanted([record(index=i) for i in range(count)])).jobs({}))


def by_number(samples: Iterable[SampleResult]) -> list[dict[str, Any]]:
    """In one order, whoever was first."""
    ordered = sorted(samples, key=lambda s: (s.index, s.cell.method, s.cell.budget or ""))
    return without_times(ordered)


def row(**fields: Any) -> dict[str, Any]:
    known = {"context": "Paragraph 1: a cat.", "input": "", "answers": ["1"], "all_classes": None}
    return {**known, "length": 10, **fields}


def command(*arguments: object) -> Result:
    """`kvfold eval` with one worker."""
    words = ["eval", "--workers", "1", *map(str, arguments)]
    return CliRunner().invoke(app, words, env={"COLUMNS": "160"})


def own_questions(path: Path) -> Path:
    rows = [
        {"context": words(40, seed), "question": "Which?", "answer": "7", "max_new_tokens": 4}
        for seed in range(2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"context": "x"}\n')
    return path


@torch.no_grad()
def read(model: Any, cache: kvfold.CompressedCache, ids: Tensor) -> Tensor:
    return model(ids, past_key_values=cache, use_cache=True).logits


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Every context that is asked about, and a copy of what it held before."""
    found: list[tuple[Any, Any]] = []
    real = agnostic._compressed

    def watching(*arguments: Any) -> Any:
        for each in real(*arguments):
            # Sinks that move come to rest when the first reader does.
            fork(each.cache)
            found.append((each.cache, contents(each.cache)))
            yield each

    monkeypatch.setattr(agnostic, "_compressed", watching)
    return found


def positions(cache: kvfold.CompressedCache, length: int) -> list[list[list[int]]]:
    """Kept positions before `length`, of each layer's heads."""
    layers = range(len(cache.states))
    return [[head[head < length].tolist() for head in cache.positions(i)[0]] for i in layers]


def cut_in_the_middle(ids: Tensor, limit: int) -> list[int]:
    """LongBench's: `pred.py` keeps half of what fits from either end."""
    half = limit // 2
    return ids[0, :half].tolist() + ids[0, ids.shape[1] - (limit - half) :].tolist()


@torch.no_grad()
def surprise(setting: Setting, ids: Tensor, allowed: Tensor | None = None) -> Tensor:
    """−log p of every token but the first, from one forward; `allowed [N, N]` are seen by each."""
    mask = None
    if allowed is not None:
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)[None, None]
    logits = setting.plain(ids, attention_mask=mask, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")


def book(task: str, **fields: Any) -> Any:
    return record(task, 0, chat=False, count=25, **fields)


def transcript(setting: Setting, sample: Any, first: list[int]) -> tuple[Tensor, Tensor]:
    """The tokens before each of two answers, of which the first is given."""
    frame, (one, two) = setting.prompt(sample).frame, sample.questions
    opening = f"{frame.before}{sample.context}"
    asked = [f"{q.text}{frame.after}{q.answer_prefix}" for q in (one, two)]
    before = torch.cat([setting.ids(opening), setting.ids(asked[0])], 1)
    return before, torch.cat(
        [before, torch.tensor([first]), setting.ids(frame.between + asked[1])], 1
    )
