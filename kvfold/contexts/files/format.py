# SPDX-License-Identifier: Apache-2.0
"""What a context file is: safetensors whose metadata say, typed, what the tensors are.

Tensors of a layer are of one KV head each, `layers.<index>.<part>.<head>`: some heads can be
read alone; what has no heads is `layers.<index>.<part>`, `others.<index>.<part>`, `rope.<name>`,
`prefix`, and `ids`, the document's tokens. Entry i of a head is token `ids[positions[i]]` (of
segments: `ids[columns[i]]`), or `ids[i]` without such a tensor, as nothing was evicted.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvfold.errors import ContextFileError, KvfoldError

# Raised whenever a file of one version would be misread by the other.
VERSION = "1"
# Names in the metadata of safetensors, which are texts.
FORMAT, HEADER, CHECKSUM = "kvfold_context", "header", "checksum"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelPart(_Part):
    """The model that read the document: see `identity.py`."""

    name: str
    config: dict[str, Any]
    config_hash: str
    weights: str
    vocabulary: str


class RopePart(_Part):
    """How keys were rotated, to their original positions; frequencies are tensors of the file.

    `moved` is by how many positions the stored keys were rotated beyond that.
    """

    parameters: dict[str, Any]
    scaling: dict[str, float]
    moved: int


class LayerPart(_Part):
    """A compressed layer: `by_head` and `whole` name tensors; see `cache/state.py` for the rest."""

    index: int
    store: Literal["dense", "segments"]
    kept: list[int]
    dead: int
    new: int
    first_new: int
    seen: int
    turns: int
    evicted_at: int
    surplus: int | None
    over_budget: bool
    by_head: list[str]
    whole: list[str]


class OtherPart(_Part):
    """A layer that stays transformers' own: its class, its numbers, the names of its tensors."""

    index: int
    kind: str
    numbers: dict[str, Any]
    by_head: list[str]
    whole: list[str]


class BudgetPart(_Part):
    """A `Budget`."""

    kind: Literal["tokens", "ratio", "bytes"]
    amount: int | float


class Header(_Part):
    """All that a file says beside its tensors.

    `method` spells out every option. `bits` are those of keys and values where they are packed.
    Tensors in `same_as` are stored once, under the other name. Checksums are of each tensor's
    dtype, shape and bytes. `origins` are the modules of methods that are not kvfold's own, by name.
    """

    written_by: str
    method: str
    budget: BudgetPart | None
    protect: list[tuple[int, int]]
    seed: int
    per_chunk: int | None
    seen: int
    dtype: str
    bits: tuple[int, int] | None
    before: str
    after: str
    between: str | None
    model: ModelPart
    rope: RopePart
    has_prefix: bool
    layers: list[LayerPart]
    others: list[OtherPart]
    same_as: dict[str, str]
    checksums: dict[str, str]
    origins: dict[str, str] = {}


def together(of_ranks: tuple[LayerPart | OtherPart, ...]) -> LayerPart | OtherPart:
    """What is said of a layer whose KV heads ranks hold, in their order.

    Raises KvfoldError where they differ in what all heads have in common.
    """
    first = of_ranks[0]
    same: dict[str, Any] = {}
    if isinstance(first, LayerPart):
        layers = [part for part in of_ranks if isinstance(part, LayerPart)]
        full = all(part.surplus is not None for part in layers)
        same = {
            "kept": [count for part in layers for count in part.kept],
            "surplus": first.surplus if full else None,
            "over_budget": any(part.over_budget for part in layers),
        }
    joined = first.model_copy(update=same)
    if any(part.model_copy(update=same) != joined for part in of_ranks):
        raise KvfoldError(f"ranks hold layer {first.index} differently: compress in one process")
    return joined


def digest(text: str) -> str:
    """A checksum of a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digest_of(tensor: Tensor) -> str:
    """A checksum of a tensor on the CPU: of its dtype, its shape and its bytes."""
    made = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)} ".encode(), digest_size=16)
    made.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return made.hexdigest()


def metadata(header: Header) -> dict[str, str]:
    """The header as metadata of safetensors."""
    # Without, a file is as it was before there were any.
    text = header.model_dump_json(exclude=None if header.origins else {"origins"})
    return {FORMAT: VERSION, HEADER: text, CHECKSUM: digest(VERSION + text)}


class ContextFile:
    """An open context file; tensors are read, and checked, one by one."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self._file = path, file
        self.header = self._checked_header(file.metadata() or {})
        if set(file.keys()) != set(self.header.checksums):
            raise self.damaged("its tensors are not those it lists")

    def tensor(self, name: str) -> Tensor:
        """A tensor on the CPU; raises ContextFileError where it is not as it was written."""
        name = self.header.same_as.get(name, name)
        if name not in self.header.checksums:
            raise self.damaged(f"it has no tensor {name}")
        tensor: Tensor = self._file.get_tensor(name)
        if digest_of(tensor) != self.header.checksums[name]:
            raise self.damaged(f"{name} was altered")
        return tensor

    def check(self) -> None:
        """Reads all tensors; raises ContextFileError where one is not as it was written."""
        for name in self.header.checksums:
            self.tensor(name)

    def damaged(self, how: str) -> ContextFileError:
        """The error that says what is wrong with this file."""
        return ContextFileError(
            f"{self.path} is damaged, {how}: take another copy, or compress the document again"
        )

    def _checked_header(self, found: dict[str, str]) -> Header:
        if FORMAT not in found:
            raise ContextFileError(f"{self.path} is a safetensors file, but no context of kvfold")
        if found[FORMAT] != VERSION:
            raise ContextFileError(
                f"{self.path} has format version {found[FORMAT]!r}, and this kvfold reads "
                f"{VERSION!r}: update kvfold, or compress the document again"
            )
        text = found.get(HEADER, "")
        if digest(VERSION + text) != found.get(CHECKSUM):
            raise self.damaged("its header was altered")
        try:
            return Header.model_validate(json.loads(text))
        except (ValidationError, ValueError, RecursionError) as problem:
            raise self.damaged("its header says something else than this version's") from problem


@contextmanager
def opened(path: str | Path) -> Iterator[ContextFile]:
    """The file at `path`; raises ContextFileError where there is none, or not a whole one."""
    path = Path(path)
    try:
        with _held(path) as place, safe_open(place, framework="pt") as file:
            yield ContextFile(path, file)
    except (OSError, SafetensorError) as problem:
        raise ContextFileError(f"cannot read {path}: {_what_is_wrong(path, problem)}") from problem


@contextmanager
def _held(path: Path) -> Iterator[Path]:
    """Another name of the file that is at `path` now, whatever takes its place meanwhile.

    safetensors opens a name twice: it would read the header of one file and tensors of another.
    Raises OSError for what is no file, such as a pipe, which would be waited for.
    """
    opened = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError("it is no file")
        held = Path(f"/dev/fd/{opened}")
        yield held if held.exists() else path
    finally:
        os.close(opened)


def _what_is_wrong(path: Path, problem: Exception) -> str:
    """Why a file cannot be opened, in words for whoever named it."""
    if not path.exists():
        return "there is no such file"
    if path.is_file() and not _begins_as_safetensors(path):
        return "it is no context file; make one with `kvfold compress`"
    return f"no whole context: {problem}"


def _begins_as_safetensors(path: Path) -> bool:
    """Whether a JSON object follows eight bytes that are its length."""
    try:
        with path.open("rb") as file:
            return file.read(9)[8:] == b"{"
    except OSError:
        return True


def read_header(path: str | Path) -> Header:
    """What the file at `path` holds, without its tensors; raises ContextFileError."""
    with opened(path) as file:
        return file.header
