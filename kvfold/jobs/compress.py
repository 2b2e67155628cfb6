# SPDX-License-Identifier: Apache-2.0
"""Compression of many documents, each to a context file, by the next free worker.

Also of texts that files hold, so that they fit an engine's pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.budget import Budget
from kvfold.cache.stats import Stats
from kvfold.codecs.codec import Kvtc, codec_of, spelled
from kvfold.contexts import context
from kvfold.contexts.files.format import opened, read_header
from kvfold.contexts.files.header import Header
from kvfold.contexts.files.read import check_model, keeps_scores
from kvfold.contexts.files.read import load as load_context
from kvfold.contexts.levelled import level_of, reshaped
from kvfold.errors import KvfoldError
from kvfold.evidence.outputs import REPLACE, check_made
from kvfold.fitted.file import digest_of_file
from kvfold.fitted.fits import digests_of
from kvfold.generation.request import Compress
from kvfold.hf.identity import check_identifiable
from kvfold.hf.template_arguments import date_told
from kvfold.hf.user_text import Content
from kvfold.jobs.executor import WorkerSpec, told
from kvfold.loading import Loading
from kvfold.methods.base import Method, parse, spelled_out
from kvfold.methods.stages.select.one_set import Rule


@dataclass(frozen=True)
class CompressOptions:
    """Options of `kvfold.compress`, the same for all documents of a run."""

    method: Method
    budget: Budget | None
    prefill_chunk: int | None
    compress: Compress
    seed: int
    special_tokens: bool = False
    allow_longer: bool = False
    keep_scores: bool = False
    codec: str | None = None
    level: Rule | None = None
    system: str | None = None
    template: Mapping[str, Any] | None = None

    def compressed(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> context.Context:
        """The document `text`, compressed with these options.

        Raises as `kvfold.compress`, and as `Context.levelled`.
        """
        made = context.compress(
            model,
            tokenizer,
            Content(text),
            self.method,
            self.budget,
            compress=self.compress,
            **self.reading,
        )
        if self.level is None:
            return made
        return made.levelled(self.level, prefill_chunk=self.prefill_chunk)

    @property
    def reading(self) -> dict[str, Any]:
        """Options of `compress` and of `compress_each`."""
        names = "prefill_chunk seed special_tokens allow_longer keep_scores system template"
        return {name: getattr(self, name) for name in names.split()}

    @property
    def file_method(self) -> Method:
        """The method that files name."""
        return self.method if self.level is None else level_of(self.method, self.level)


def check_options(path: Path, options: CompressOptions) -> None:
    """Raises KvfoldError if the context file at `path` was compressed with other options."""
    header = read_header(path)
    limit = None if header.budget is None else Budget(header.budget.kind, header.budget.amount)
    chunk = options.prefill_chunk if options.compress == "per_chunk" else None
    codec = None if options.codec is None else spelled(codec_of(options.codec))
    scores = keeps_scores(header, options.file_method)
    entries = None if header.codec is None else header.codec.entries
    for option, found, wanted in (
        ("method", header.method, spelled_out(options.file_method)),
        ("fit", _shown(header.fits), _shown(digests_of(options.file_method.stages()))),
        ("budget", limit, options.budget),
        ("seed", header.seed, options.seed),
        ("per_chunk", header.per_chunk, chunk),
        ("codec", header.codec and header.codec.codec, codec),
        ("basis", entries and entries.basis, entries and _basis(options.codec)),
        ("keep_scores", scores, options.keep_scores),
        ("system", header.system, options.system),
        ("template", header.arguments, dict(options.template or {})),
    ):
        check_made(path, option, found, wanted)


def _shown(fits: dict[str, str]) -> str:
    """Checksums of fits by their first letters, "none" without any."""
    return ", ".join(f"{method} {of[:8]}" for method, of in sorted(fits.items())) or "none"


def _basis(codec: str | None) -> str | None:
    """Digest of the basis that a codec names."""
    chosen = None if codec is None else codec_of(codec)
    return digest_of_file(chosen.file) if isinstance(chosen, Kvtc) else None


def check_models(
    paths: Iterable[Path], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises ContextFileError for a context file of another model.

    Files with the same model header are checked once: hashing the weights is slow.
    """
    checked: set[str] = set()
    for path in paths:
        key = _model_key(read_header(path))
        if key not in checked:
            check_model(path, model, tokenizer)
            checked.add(key)


def _model_key(header: Header) -> str:
    """All fields of a header that identify the model, as one string."""
    rope = sorted(item for item in header.checksums.items() if item[0].startswith("rope."))
    return f"{header.dtype} {header.model!r} {header.rope!r} {rope}"


@dataclass(frozen=True)
class CompressJob:
    """A text to compress and the path of its context file; every worker must see that folder."""

    text: str
    path: Path
    options: CompressOptions

    @property
    def codec(self) -> str | None:
        """The codec of the file."""
        return self.options.codec

    def made(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> context.Context:
        """The context; raises as `CompressOptions.compressed`."""
        return self.options.compressed(model, tokenizer, self.text)


def check_texts(jobs: Iterable[CompressJob], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises KvfoldError for a job whose context file is of other tokens than its text has now."""
    for job in jobs:
        made = job.options
        _, ids = context.prompt(
            tokenizer, made.method, job.text, made.special_tokens, made.system, made.template
        )
        with opened(job.path) as file:
            found = file.tensor("ids")
        if not torch.equal(found.long(), ids[0]):
            raise KvfoldError(
                f"{job.path} is there already, made of other tokens than the document has now (by "
                f"its text, --encoding, --special-tokens or the chat template): {REPLACE}"
                f"{date_told(tokenizer)}"
            )


def check_same(
    jobs: Sequence[CompressJob], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raises as `check_models` and `check_texts` for files that are there already."""
    check_models([job.path for job in jobs], model, tokenizer)
    check_texts(jobs, tokenizer)


@dataclass(frozen=True)
class RereadJob:
    """The text of the context file `source`, read again in another shape into `path`.

    `shape`: a rule that makes one set of tokens for all heads, or the entries of whole pages.
    """

    source: Path
    path: Path
    shape: Rule | int
    prefill_chunk: int | None = None
    codec: str | None = None

    def made(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> context.Context:
        """The context; raises as `kvfold.load`, `Context.levelled` and `Context.paged`."""
        uneven = load_context(self.source, model, tokenizer)
        if isinstance(self.shape, int):
            return uneven.paged(self.shape, prefill_chunk=self.prefill_chunk)
        return uneven.levelled(self.shape, prefill_chunk=self.prefill_chunk)

    def check_there(self) -> None:
        """Raises KvfoldError for a file at `path` that is not the source's text in this shape."""
        with opened(self.path) as there, opened(self.source) as source:
            method = reshaped(parse(source.header.method), self.shape)
            made = spelled_out(method), source.header.budget
            same = (there.header.method, there.header.budget) == made
            if not same or not torch.equal(there.tensor("ids"), source.tensor("ids")):
                raise KvfoldError(f"{self.path} is there already, of another request: {REPLACE}")


Job = CompressJob | RereadJob


@dataclass(frozen=True)
class CompressResult:
    """Result of one document: the stats of its cache, or (`stats` None) the reason in `why`."""

    path: Path
    stats: Stats | None
    why: str | None = None


def worker_spec(name: str, loading: Loading | None = None) -> WorkerSpec[Job, CompressResult]:
    """Spec of workers that compress documents with the model `name`."""
    return WorkerSpec(name, _results, _given_up, loading=loading or Loading())


def _given_up(job: Job, why: str) -> CompressResult:
    return CompressResult(job.path, None, why)


def _results(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: Job
) -> Iterator[CompressResult]:
    yield compress_document(model, tokenizer, job)


def compress_document(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: Job
) -> CompressResult:
    """Compresses a document and writes its file; a failure is returned in `why`, not raised."""
    try:
        check_identifiable(model)
        made = job.made(model, tokenizer)
        made.save(job.path, codec=job.codec)
    # Whatever is wrong with one document, the others may be sound, or shorter.
    except Exception as problem:
        return CompressResult(job.path, None, told(problem))
    return CompressResult(job.path, made.stats())
