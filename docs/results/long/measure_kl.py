# SPDX-License-Identifier: Apache-2.0
"""KL to the full cache over long answers: `python -m docs.results.long.measure_kl MODEL OUT.jsonl`.

The full cache answers the prompts of long_answers.jsonl; end tokens are not drawn. Each method then
reads these answers, and its prediction after each token is compared with the full cache's. All
evict in rounds and keep the prompt beside the budget: only their scores differ. Recall reads as
many entries of prompt and answer for each token. Rows of OUT are not measured again.

Tokens whose attention no score reads are read together, frozen: nothing is evicted among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.checks.batches import PaddedIds
from kvfold.checks.encoded import encode
from kvfold.checks.measure import distances
from kvfold.checks.prompts import prompts_of
from kvfold.contexts.answer import end_tokens
from kvfold.evidence.records import RecordFile
from kvfold.loading import Loading, load
from kvfold.methods.recall import Recall
from kvfold.observers.column_sums import ColumnSums
from kvfold.observers.last_queries import window_of

PROMPTS = Path(__file__).with_name("prompts.jsonl")
METHODS = [
    "random", "streaming_llm_original:decode=append", "knorm", "keydiff", "lagkv",
    "expected_attention", "h2o:decode=append", "scissorhands", "snapkv_decode", "rkv",
    "triattention", "recall",
]  # fmt: skip
BUDGETS = [256, 512]
INTERVAL, STRETCH = 128, 64  # tokens between rounds; tokens that a number of a record is a mean of
TEMPERATURE = 0.7
ROWS = 3  # prompts of a batch


class AnswerDistance(BaseModel):
    """One answer read by one method: means over each `STRETCH` of its tokens.

    `answer` is the digest of prompt and answer. `kl` is in nats; `agrees` is the part of the
    positions at which both caches have the same top token.
    """

    model_config = ConfigDict(frozen=True)

    model: str
    answer: str
    method: str
    budget: int
    interval: int
    tokens: int
    kl: tuple[float, ...]
    agrees: tuple[float, ...]

    @property
    def key(self) -> tuple[str, str, int]:
        """The row's name in one model's file."""
        return self.answer, self.method, self.budget


class Reading:
    """A batch of prompts in a cache, which reads on."""

    def __init__(
        self, model: PreTrainedModel, prompts: PaddedIds, method: str, budget: int | None = None
    ) -> None:
        self.model, self.mask = model, prompts.mask[:, :0]
        self.cache = kvfold.CompressedCache(model, method, budget)
        self.last = self._read(*prompts)[:, -1]  # logits [B, V]

    def __call__(self, ids: Tensor) -> Tensor:
        """Logits `[B, S, V]` after each of the next tokens `ids [B, S]`."""
        logits = self._read(ids, torch.ones_like(ids))
        self.last = logits[:, -1]
        return logits

    def frozen(self, ids: Tensor) -> Tensor:
        """The same, and nothing is observed or evicted."""
        with self.cache.frozen():
            return self(ids)

    def _read(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, mask], 1)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model(
            ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache
        )
        logits: Tensor = out.logits
        return logits


@dataclass(frozen=True)
class Answers:
    """Prompts, the full cache's answers `ids [B, S]`, and its logits `[B, S, V]` after them."""

    prompts: PaddedIds
    ids: Tensor
    logits: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, prompts: PaddedIds, tokens: int) -> Answers:
        """Answers of `tokens` tokens, drawn with a seed."""
        reading = Reading(model, prompts, "full")
        generator, ends = torch.Generator().manual_seed(0), list(end_tokens(model))
        ids, logits = list[Tensor](), list[Tensor]()
        for _ in range(tokens):
            likely = reading.last / TEMPERATURE
            likely[:, ends] = -torch.inf
            ids.append(likely.softmax(-1).multinomial(1, generator=generator))
            logits.append(reading(ids[-1]))
        return cls(prompts, torch.cat(ids, 1), torch.cat(logits, 1))

    @property
    def digests(self) -> list[str]:
        """Hash of each row's prompt and answer."""
        rows = zip(self.prompts.ids, self.prompts.mask, self.ids, strict=True)
        said = [[*ids[mask > 0].tolist(), *answer.tolist()] for ids, mask, answer in rows]
        return [hashlib.blake2b(repr(one).encode(), digest_size=8).hexdigest() for one in said]


@torch.no_grad()
def measured(
    model: PreTrainedModel, answers: Answers, method: str, budget: int
) -> tuple[Tensor, Tensor]:
    """KL and agreement `[B, S]` after each token of the answers, read by one method."""
    reading = Reading(model, answers.prompts, *run_as(method, budget))
    lengths = pieces(reading.cache, answers.ids.shape[1])
    kl, agrees = list[Tensor](), list[Tensor]()
    for ids, full in zip(
        answers.ids.split(lengths, 1), answers.logits.split(lengths, 1), strict=True
    ):
        logits = reading(ids) if ids.shape[1] == 1 else reading.frozen(ids)
        found = [distances(*row) for row in zip(full, logits, ids, strict=True)]
        kl.append(torch.stack([row.kl for row in found]))
        agrees.append(torch.stack([row.agrees.float() for row in found]))
    return torch.cat(kl, 1), torch.cat(agrees, 1)


def run_as(method: str, budget: int) -> tuple[str, int | None]:
    """The method and budget to run with: recall's entries are those that a token reads."""
    if method != "recall":
        return f"{method} + every:interval={INTERVAL},prompt=kept", budget
    always = kvfold.parse(method)
    assert isinstance(always, Recall)
    return f"recall:read={budget - always.sinks - always.residual}", None


def pieces(cache: kvfold.CompressedCache, tokens: int) -> list[int]:
    """Lengths of pieces: single tokens where scores read their attention, or entries go cold."""
    stages = cache.method.stages()
    needs, recalls = stages.needs, stages.encode is not None and stages.encode.recalls
    single = INTERVAL if ColumnSums in needs or recalls else min(INTERVAL, max(1, window_of(needs)))
    interval = [INTERVAL - single] * (single < INTERVAL) + [1] * single
    return interval * (tokens // INTERVAL) + [1] * (tokens % INTERVAL)


def rows(
    model: PreTrainedModel, name: str, answers: Answers, cells: Sequence[tuple[str, int]]
) -> Iterator[list[AnswerDistance]]:
    """The rows of each method and budget, one an answer."""
    for method, budget in cells:
        kl, agrees = (
            torch.stack([part.mean(1) for part in each.split(STRETCH, 1)], 1).tolist()
            for each in measured(model, answers, method, budget)
        )
        yield [
            AnswerDistance(
                model=name,
                answer=digest,
                method=method,
                budget=budget,
                interval=INTERVAL,
                tokens=answers.ids.shape[1],
                kl=tuple(round(number, 6) for number in kl[row]),
                agrees=tuple(round(number, 4) for number in agrees[row]),
            )
            for row, digest in enumerate(answers.digests)
        ]


def batches(tokenizer: PreTrainedTokenizerBase, path: Path) -> Iterator[PaddedIds]:
    """The prompts of a file in the model's chat template."""
    ids = [encode(tokenizer, one, question_aware=True, seed=0).ids for one in prompts_of(path)]
    for first in range(0, len(ids), ROWS):
        yield PaddedIds.of(ids[first : first + ROWS], torch.device("cpu"))


def main(
    model: str,
    out: Path,
    prompts: Annotated[Path, typer.Option(help="As for kvfold check.")] = PROMPTS,
    method: Annotated[list[str], typer.Option(help="May be repeated.")] = METHODS,
    budget: Annotated[list[int], typer.Option(help="Entries of the answer; repeat.")] = BUDGETS,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 1024,
) -> None:
    """Adds what is missing to OUT, method by method."""
    torch.set_num_threads(1)
    network, tokenizer = load(model, Loading(device="cpu"))
    records = RecordFile(out, AnswerDistance)
    known = {row.key for row in records.load().records}
    cells = [(name, size) for size in budget for name in method]
    for batch in batches(tokenizer, prompts):
        answers = Answers.of(network, batch, tokens)
        missing = [c for c in cells if any((digest, *c) not in known for digest in answers.digests)]
        for made in rows(network, Path(model).name, answers, missing):
            records.add(row for row in made if row.key not in known)
            mean = sum(sum(row.kl) / len(row.kl) for row in made) / len(made)
            print(f"{made[0].method} at {made[0].budget}: mean KL {mean:.4f}", flush=True)


if __name__ == "__main__":
    typer.run(main)
