# SPDX-License-Identifier: Apache-2.0
"""Many documents into files, each by whichever worker is free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.budget import Budget
from kvfold.cache.stats import Stats
from kvfold.contexts import context
from kvfold.contexts.files.format import Header, read_header
from kvfold.contexts.files.read import check_model
from kvfold.errors import KvfoldError
from kvfold.generation.generate import Compress
from kvfold.jobs.executor import Work
from kvfold.loading import Loading
from kvfold.methods.base import Method, spelled_out


@dataclass(frozen=True)
class Settings:
    """How documents are compressed, as for `kvfold.compress`."""

    method: Method
    budget: Budget | None
    prefill_chunk: int | None
    compress: Compress
    seed: int
    special_tokens: bool = False
    allow_longer: bool = False

    def compressed(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> context.Context:
        """A document, compressed so; raises what `kvfold.compress` raises."""
        return context.compress(
            model,
            tokenizer,
            text,
            self.method,
            self.budget,
            prefill_chunk=self.prefill_chunk,
            compress=self.compress,
            seed=self.seed,
            special_tokens=self.special_tokens,
            allow_longer=self.allow_longer,
        )


def check_settings(path: Path, settings: Settings) -> None:
    """Raises KvfoldError for a context file that was compressed in another way than these say."""
    header = read_header(path)
    limit = None if header.budget is None else Budget(header.budget.kind, header.budget.amount)
    piece = settings.prefill_chunk if settings.compress == "per_chunk" else None
    for what, there, here in (
        ("method", header.method, spelled_out(settings.method)),
        ("budget", limit, settings.budget),
        ("seed", header.seed, settings.seed),
        ("per_chunk", header.per_chunk, piece),
    ):
        if there != here:
            raise KvfoldError(
                f"{path} is there already, made with {what} {there} instead of {here}: remove it, "
                "or write into another folder"
            )


def check_models(
    paths: Iterable[Path], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises ContextFileError for a context file of another model; equal ones are compared once."""
    right: set[str] = set()
    for path in paths:
        told = _model_of(read_header(path))
        if told not in right:
            check_model(path, model, tokenizer)
            right.add(told)


def _model_of(header: Header) -> str:
    """All that a file tells about its model."""
    rope = sorted(item for item in header.checksums.items() if item[0].startswith("rope."))
    return f"{header.dtype} {header.model!r} {header.rope!r} {rope}"


@dataclass(frozen=True)
class Document:
    """A text, and the file that is written of it; a worker elsewhere needs the same folder."""

    text: str
    path: Path
    settings: Settings


@dataclass(frozen=True)
class Made:
    """What came of a document: what its file holds, or why there is none."""

    path: Path
    stats: Stats | None
    why: str | None = None


def work(name: str, loading: Loading | None = None) -> Work[Document, Made]:
    """What workers with the model `name` do with documents."""
    return Work(name, make, _given_up, loading or Loading())


def _given_up(document: Document, why: str) -> Made:
    return Made(document.path, None, why)


def make(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, document: Document) -> Made:
    """Compresses a document and writes its file."""
    try:
        made = document.settings.compressed(model, tokenizer, document.text)
        made.save(document.path)
    except (KvfoldError, RuntimeError) as problem:
        # A RuntimeError is memory that is used up: the other documents may be shorter.
        return Made(document.path, None, str(problem).partition("\n")[0])
    return Made(document.path, made.stats())
