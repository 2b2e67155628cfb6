# SPDX-License-Identifier: Apache-2.0
"""Entries, bytes and step time of long answers.

`python -m docs.results.long.measure_run MODEL OUT.jsonl`

Each method answers a random prompt greedily, beyond end tokens and, with enough tokens, beyond the
length of the model's training. Bytes are counted before each round. At the end a second, young
answer of the same method takes turns with the long one, token by token, so that the ratio of their
step times is free of what else the machine does.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from pydantic import BaseModel, ConfigDict

import kvfold
from kvfold.bench.models import BenchModel
from kvfold.evidence.records import RecordFile

INTERVAL = 128
COMPARED = 8  # rounds in which the long and the young answer take turns
METHODS = [
    "knorm + every", "keydiff + every", "lagkv + every", "expected_attention + every", "rkv",
    "snapkv_decode", "triattention:prompt=counted", "scissorhands", "h2o", "tova", "streaming_llm",
]  # fmt: skip


class Mark(BaseModel):
    """A cache after `generated` tokens: mean entries of a head, and most bytes since last time."""

    model_config = ConfigDict(frozen=True)

    generated: int
    entries: float
    most_bytes: int


class LongRun(BaseModel):
    """One long answer; times are None for one too short to be compared.

    `late_ms` is the mean processor time of the last steps, rounds included, and `late_over_early`
    its ratio to that of a young answer's steps.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    trained_length: int
    method: str
    budget: int | None
    interval: int
    prompt: int
    tokens: int
    late_ms: float | None
    late_over_early: float | None
    marks: tuple[Mark, ...]

    @property
    def flat(self) -> bool:
        """True if the answer never took more bytes than until its first mark."""
        first, *later = (mark.most_bytes for mark in self.marks)
        return all(most <= first for most in later)


class Answer:
    """An answer that is being written: `step` adds one token, the likeliest."""

    def __init__(self, subject: BenchModel, method: str, budget: int | None, prompt: int) -> None:
        self.model = subject.model
        self.cache = kvfold.CompressedCache(self.model, method, budget)
        self.generated = 0
        self._read(subject.tokens(1, prompt))

    def _read(self, ids: torch.Tensor) -> None:
        out = self.model(ids, past_key_values=self.cache, logits_to_keep=1)
        self.token = out.logits.argmax(-1)

    def step(self) -> float:
        """Processor seconds of one token."""
        began = time.process_time()
        self._read(self.token)
        self.generated += 1
        return time.process_time() - began

    def size(self) -> tuple[float, int]:
        """Mean entries of a head, and bytes."""
        stats = self.cache.stats()
        return stats.mean_kept, stats.nbytes


@torch.no_grad()
def long_run(
    subject: BenchModel, method: str, budget: int | None, prompt: int, tokens: int, every: int
) -> LongRun:
    """The record of one method, with a mark after each `every` tokens."""
    answer = Answer(subject, method, budget, prompt)
    interval = answer.cache.method.stages().interval or INTERVAL
    last, marks, most = COMPARED * interval, list[Mark](), 0
    young, late, early = None, list[float](), list[float]()
    for generated in range(1, tokens + 1):
        taken = answer.step()
        if generated % interval == interval - 1 or generated % every == 0:
            entries, nbytes = answer.size()
            most = max(most, nbytes)
        if generated % every == 0:
            marks.append(Mark(generated=generated, entries=entries, most_bytes=most))
            most = 0
        if generated > tokens - last and tokens > 2 * last:
            young = young or settled(Answer(subject, method, budget, prompt), 2 * interval)
            late.append(taken)
            early.append(young.step())
    return LongRun(
        model=Path(subject.source.name).name,
        trained_length=subject.model.config.max_position_embeddings,
        method=method,
        budget=budget,
        interval=interval,
        prompt=prompt,
        tokens=tokens,
        late_ms=1000 * statistics.mean(late) if late else None,
        late_over_early=sum(late) / sum(early) if late else None,
        marks=tuple(marks),
    )


def settled(answer: Answer, tokens: int) -> Answer:
    """The answer, `tokens` longer."""
    for _ in range(tokens):
        answer.step()
    return answer


def main(
    model: str,
    out: Path,
    method: Annotated[list[str], typer.Option(help="May be repeated.")] = METHODS,
    budget: Annotated[int, typer.Option(help="Entries of methods that take one.")] = 256,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens of the answer.")] = 32_768,
    every: Annotated[int, typer.Option(help="Tokens between two marks.")] = 1024,
) -> None:
    """Adds one record for each method to OUT, and prints what it holds."""
    torch.set_num_threads(1)
    subject = BenchModel.of(model, None, 0, "cpu")
    for name in method:
        held = budget if kvfold.parse(name).takes_budget else None
        made = long_run(subject, name, held, prompt, tokens, every)
        RecordFile(out, LongRun).add([made])
        most = max(mark.most_bytes for mark in made.marks)
        print(
            f"{made.model} {name}: {tokens} tokens, at most {most} bytes, "
            f"{'flat' if made.flat else 'NOT FLAT'}; late over early steps {made.late_over_early}",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
