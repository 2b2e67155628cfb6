# SPDX-License-Identifier: Apache-2.0
"""Fitted numbers in files: safetensors with a header in the metadata, read without any model.

Names of tensors: the fields of the kind, such as `Scorer`, and `rope.<name>`, the RoPE frequencies
of the model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvfold.errors import ScorerFileError
from kvfold.fitted.numbers import Fitted
from kvfold.hf.header import HeaderPart, ModelHeader, RopeHeader, digest, digest_of
from kvfold.reading import read_text, stable_path

VERSION = "1"  # incremented when a file of one version would be misread by the other
FORMAT, HEADER, CHECKSUM = "kvfold_scorer", "header", "checksum"
Kind = TypeVar("Kind", bound=Fitted)


class ScorerHeader(HeaderPart):
    """Header of a file of `kvfold fit`: the model, and how the numbers were fitted.

    `target` is the method whose scores were learned, or that the numbers are for, `texts` the
    number of texts read, `report` the fit's measurements, `checksums` those of each tensor.
    `request` is a digest of what was asked for; "" in files from before it was noted.
    """

    written_by: str
    target: str
    texts: int
    dtype: str
    model: ModelHeader
    rope: RopeHeader
    report: dict[str, Any] = Field(default_factory=dict)
    checksums: dict[str, str] = Field(default_factory=dict)
    request: str = ""


def read_table(path: str | Path) -> Tensor:
    """Numbers `[L, H]` of a text table, a line for each layer, clipped to 0 … 1.

    Raises ScorerFileError if it cannot be read as such. Source: mit-han-lab/duo-attention,
    `full_attention_heads.tsv`.
    """
    try:
        lines = read_text(path).splitlines()
        table = torch.tensor([[float(word) for word in line.split()] for line in lines if line])
    except (OSError, ValueError) as problem:
        raise ScorerFileError(
            f"cannot read {path} as a table of heads ({problem}): give a line for each layer, a "
            "number from 0 to 1 for each KV head"
        ) from problem
    if table.dim() != 2 or not bool(table.isfinite().all()):
        raise ScorerFileError(f"{path} is no table of finite numbers: a line for each layer")
    return table.clamp(0, 1)


def read_kind(path: str | Path, kind: type[Kind]) -> tuple[Kind, list[Tensor]]:
    """Fitted numbers in a file, for any model, and the RoPE frequencies of that model, if named.

    Raises ScorerFileError if the file is damaged, of another version or another `kind`.
    """
    if Path(path).suffix in kind.tables:
        return kind(*[read_table(path)]), []
    header, tensors = read_scorer_file(path)
    names = [field.name for field in dataclasses.fields(kind)]
    if not set(names) <= tensors.keys():
        own = header.target == kind.method
        which = "is of another version of kvfold" if own else f"was fitted from {header.target}"
        raise ScorerFileError(
            f"{path} {which}, and is no file for {kind.method}: {how_to_fit(kind)}"
        )
    frequencies = [tensor for name, tensor in tensors.items() if name.startswith("rope.")]
    fitted = kind(*(tensors[name] for name in names))
    wrong = fitted.problem()
    if wrong is not None:
        raise _damaged(str(path), wrong)
    return fitted, frequencies


def how_to_fit(kind: type[Fitted]) -> str:
    """The command that fits such a file, and how a method names it."""
    return f"`{kind.command} --out FILE`, and name it, {kind.method}:file=FILE"


def digest_of_file(path: str | Path) -> str:
    """Digest of the tensors of a file of `kvfold fit`, by its header; raises ScorerFileError."""
    with _told(path), _opened(str(path)) as (header, _):
        return digest(json.dumps(header.checksums, sort_keys=True))


def read_scorer_file(path: str | Path) -> tuple[ScorerHeader, dict[str, Tensor]]:
    """Header and tensors of a file of `kvfold fit`; raises ScorerFileError if it is damaged."""
    with _told(path):
        state = Path(path).stat()
        return _read(str(path), state.st_mtime_ns, state.st_size)


@contextmanager
def _told(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as problem:
        raise ScorerFileError(
            f"cannot read {path} as a fitted scorer ({problem}): `kvfold fit` writes such files"
        ) from problem


@lru_cache(maxsize=8)
def _read(path: str, modified: int, size: int) -> tuple[ScorerHeader, dict[str, Tensor]]:
    with _opened(path) as (header, file):
        tensors = {name: file.get_tensor(name) for name in header.checksums}
    if header.checksums != {name: digest_of(tensor) for name, tensor in tensors.items()}:
        raise _damaged(path, "its tensors were altered")
    return header, tensors


@contextmanager
def _opened(path: str) -> Iterator[tuple[ScorerHeader, Any]]:
    """The header of a file, and the file: no tensor of another kind of file is read."""
    with stable_path(path) as place, safe_open(place, framework="pt") as file:
        header = _checked_header(path, file.metadata() or {})
        if header.checksums.keys() != set(file.keys()):
            raise _damaged(path, "its tensors were altered")
        yield header, file


def _checked_header(path: str, metadata: dict[str, str]) -> ScorerHeader:
    if FORMAT not in metadata:
        raise ScorerFileError(f"{path} is a safetensors file, but no fitted scorer of kvfold")
    if metadata[FORMAT] != VERSION:
        raise ScorerFileError(
            f"{path} has format version {metadata[FORMAT]!r}, and this kvfold reads {VERSION!r}: "
            "update kvfold, or fit the scorer again"
        )
    text = metadata.get(HEADER, "")
    if digest(VERSION + text) != metadata.get(CHECKSUM):
        raise _damaged(path, "its header was altered")
    try:
        return ScorerHeader.model_validate(json.loads(text))
    except (ValidationError, ValueError, RecursionError) as problem:
        raise _damaged(path, "its header does not have this version's fields") from problem


def _damaged(path: str, how: str) -> ScorerFileError:
    return ScorerFileError(f"{path} is damaged, {how}: take another copy, or fit the scorer again")
