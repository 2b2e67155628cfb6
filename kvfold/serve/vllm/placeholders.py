# SPDX-License-Identifier: Apache-2.0
"""Contexts in prompts of vLLM: a placeholder per kept entry, a cache salt, and what must fit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

import torch

from kvfold.contexts.files.coding import basis_of
from kvfold.contexts.files.format import ContextFile, opened, told_as_damage
from kvfold.contexts.files.header import Header, LevelHeader
from kvfold.errors import ContextFileError, KvfoldError
from kvfold.hf.chat_template import PromptFrame
from kvfold.hf.header import digest
from kvfold.methods.stages.select.top import top
from kvfold.serve.context_folder import SUFFIX
from kvfold.serve.request_schemas import CONTEXT_ID
from kvfold.serve.vllm.export import (
    EntryCounts,
    Paged,
    UnevenContext,
    check_plain,
    check_rest,
    votes,
)
from kvfold.serve.vllm.head_pages.layout import HeadPages
from kvfold.serve.vllm.meta_model import MetaModel

# Prefix of every context's salt.
PREFIX = "kvfold:"


class UnknownContext(KvfoldError):
    """No context of that name in the folder."""


@dataclass(frozen=True, eq=False)  # hashed as an object: what is known of one is kept beside it
class ServedContext:
    """A context as prompts of vLLM refer to it.

    Args:
        id: the file's name without suffix.
        salt: `cache_salt` from the file's checksums: contexts, and versions of one, share no pages.
        tokens: M placeholders; tokens that the context keeps, so that repetition penalties see
            words of the document.
        seen: N, tokens of the document.
        pages: pages of each layer and KV head; None: M entries each.
        frame: chat template parts around a question.
        vocabulary: checksum of the tokenizer's vocabulary.
        level: what levelling has changed; None: it was not levelled afterwards.
    """

    id: str
    salt: str
    tokens: list[int]
    seen: int
    pages: HeadPages | None
    frame: PromptFrame
    vocabulary: str
    level: LevelHeader | None = None

    @property
    def kept(self) -> int:
        """M, the positions that the context takes in vLLM."""
        return len(self.tokens)

    @classmethod
    def of(cls, name: str, file: ContextFile, counts: EntryCounts) -> ServedContext:
        """The context in an open file."""
        header = file.header
        return cls(
            id=name,
            salt=salt(header),
            tokens=_tokens(file, counts.count),
            seen=header.seen,
            pages=counts.pages,
            frame=header.frame,
            vocabulary=header.model.vocabulary,
            level=header.level,
        )


def salt(header: Header) -> str:
    """The `cache_salt` of a file: differs for any difference in its header, checksums included."""
    return PREFIX + digest(header.model_dump_json())


def _tokens(file: ContextFile, count: int) -> list[int]:
    """The `count` tokens of the document that most heads keep, in order."""
    chosen = top(votes(file)[None, None], torch.tensor([count]))[0, 0]
    tokens: list[int] = file.tensor("ids")[chosen].tolist()
    return tokens


class ServedFolder:
    """Context files `<id>.kvfold` of a folder; each is read once per version.

    `paged` is what vLLM's pages hold, where it attends to pages of single heads. Raises KvfoldError
    if there is no such folder.
    """

    def __init__(self, folder: str | Path, paged: Paged | None = None) -> None:
        self.folder, self.paged = Path(folder), paged
        if not self.folder.is_dir():
            raise KvfoldError(f"there is no folder {self.folder} of contexts")
        self._read: dict[str, tuple[tuple[int, int, int], ServedContext]] = {}

    def ids(self) -> list[str]:
        """Ids of all contexts, sorted."""
        names = (path.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}"))
        return sorted(name for name in names if re.fullmatch(CONTEXT_ID, name))

    def path(self, name: object) -> Path:
        """The path of a context's file; raises UnknownContext."""
        found = isinstance(name, str) and re.fullmatch(CONTEXT_ID, name)
        path = self.folder / f"{name}{SUFFIX}"
        if not found or not path.is_file():
            raise UnknownContext(f"there is no context {name!r} in {self.folder}")
        return path

    def get(self, name: object) -> ServedContext:
        """The context of a name.

        Raises UnknownContext, ContextFileError, UnevenContext, and KvfoldError for what pages lack.
        """
        path = self.path(name)
        try:
            state = path.stat()
        except OSError as problem:
            raise UnknownContext(f"there is no context {name!r} any more: {problem}") from problem
        version = (state.st_mtime_ns, state.st_size, state.st_ino)
        known = self._read.get(path.name)
        if known is None or known[0] != version:
            with opened(path) as file, told_as_damage(file):
                made = ServedContext.of(path.name.removesuffix(SUFFIX), file, self.counts(file))
            known = version, made
            # Those of texts on arrival are many, and their files are removed in time.
            there = {name: read for name, read in self._read.items() if self._is_there(name)}
            self._read = there | {path.name: known}
        return known[1]

    def _is_there(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def counts(self, file: ContextFile) -> EntryCounts:
        """Entries of an open file in vLLM.

        Raises what `check_plain` raises, and UnevenContext with the command that helps.
        """
        check_plain(file)
        path = file.path
        try:
            counts = EntryCounts.of(file.header, self.paged)
            if self.paged is not None and counts.pages is not None:
                check_rest(file, counts, self.paged.block)
            return counts
        except UnevenContext as problem:
            asked = "--level mass" if problem.size is None else f"--pages {problem.size}"
            made = path.with_name(f"{path.stem}-{asked.split()[-1]}{SUFFIX}")
            remedy = f"kvfold compress MODEL {path} {asked} --out {made}"
            raise UnevenContext(f"{problem}: {remedy}", problem.size) from None


class CompatibilityCheck:
    """Compares contexts with the model of `meta_model`, served in `dtype` ("bfloat16").

    Each version of a file is compared once.
    """

    def __init__(self, served_folder: ServedFolder, meta_model: MetaModel, dtype: str) -> None:
        self.served_folder, self.meta_model, self.dtype = served_folder, meta_model, dtype
        self._fits: WeakSet[ServedContext] = WeakSet()

    def check(self, served: ServedContext) -> None:
        """Raises ContextFileError for a context of another model, RoPE, dtype or basis."""
        if served in self._fits:
            return
        with opened(self.served_folder.path(served.id)) as file, told_as_damage(file):
            if file.header.dtype != self.dtype:
                raise ContextFileError(
                    f"{file.path} holds {file.header.dtype}, and vLLM computes in {self.dtype}: "
                    f"serve with --dtype {file.header.dtype}, or compress the document again"
                )
            self.meta_model.check(file)
            basis_of(file)
        self._fits.add(served)
