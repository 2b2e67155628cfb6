# SPDX-License-Identifier: Apache-2.0
"""Format of context files: safetensors with a typed header in the metadata.

Names of tensors:
    layers.<index>.<part>.<head>    one KV head of a compressed layer, so that heads load separately
    layers.<index>.<part>           part of a compressed layer without heads
    others.<index>.<part>[.<head>]  layer of transformers' own
    rope.<name>                     RoPE frequencies
    prefix                          leading tokens kept beside the budget [1], KVzip's
    ids                             the document's tokens [N], int32
    layers.<index>.<keys|values>.cold.<head>
                                    entries of recall, which stay in the file; .sums. are checksums
                                    of their blocks
    codec.<keys|values>.<part>      all layers' keys or values, by `codecs/kvtc.py` or `kivi.py`

With a codec, all but kvtc's are compressed: uint8 frames, whose shapes the header has.

Entry i of a head is token `ids[positions[i]]` (in ragged stores `ids[columns[i]]`), or `ids[i]` if
the layer has no such tensor, as nothing was evicted.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvfold.codecs.compression import decompressed_tensor
from kvfold.contexts.files.bounds import contradiction, excess
from kvfold.contexts.files.cold_rows import COLD, HeldFile
from kvfold.contexts.files.header import Header, LayerHeader, StockLayerHeader
from kvfold.errors import ContextFileError, KvfoldError
from kvfold.hf.header import RopeHeader, digest, digest_of, rope_differences
from kvfold.reading import stable_path
from kvfold.writing import check_kind

# Incremented when a file of one version would be misread by the other. Files with means of keys
# beside their codes are CENTRED, others with a codec CODED, those with biases of entries BIASED,
# and all others stay as they were. Cold entries are in files of any of these: a kvfold that cannot
# read them lacks the method `recall` as well, and refuses the file by that name.
VERSION, BIASED, CODED, CENTRED = VERSIONS = "1", "2", "3", "4"
# Numbers of layers that files have where one is set; others are as before the fields existed.
LATER = ("turn_end", "next_round", "settled")
# Errors of numbers and tensors that do not fit each other
UNFIT = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, StopIteration,
    TypeError, ValueError,
)  # fmt: skip
# Keys of the safetensors metadata.
FORMAT, HEADER, CHECKSUM = "kvfold_context", "header", "checksum"


def merged_over_ranks(
    of_ranks: tuple[LayerHeader | StockLayerHeader, ...],
) -> LayerHeader | StockLayerHeader:
    """The header of a layer whose KV heads are split over tensor-parallel ranks, in rank order.

    Raises KvfoldError if ranks differ in a number that holds for all heads.
    """
    first = of_ranks[0]
    same: dict[str, Any] = {}
    if isinstance(first, LayerHeader):
        layers = [header for header in of_ranks if isinstance(header, LayerHeader)]
        full = all(header.surplus is not None for header in layers)
        same = {
            "kept": [count for header in layers for count in header.kept],
            "surplus": first.surplus if full else None,
            "over_budget": any(header.over_budget for header in layers),
        }
    joined = first.model_copy(update=same)
    if any(header.model_copy(update=same) != joined for header in of_ranks):
        raise KvfoldError(f"ranks hold layer {first.index} differently: compress in one process")
    return joined


def metadata(header: Header) -> dict[str, str]:
    """The header as safetensors metadata."""
    # Left out if empty: such a file is the same as before the fields existed.
    optional = ("origins", "session", "codec", "level", "fits", "text", "arguments")
    empty: dict[str, Any] = {name: True for name in optional if not getattr(header, name)}
    empty |= {name: True for name in ("answered", "system") if getattr(header, name) is None}
    unset = {n for n in LATER if all(getattr(layer, n) is None for layer in header.layers)}
    if unset:
        empty["layers"] = {"__all__": unset}
    text = header.model_dump_json(exclude=empty)
    version = _version(header)
    return {FORMAT: version, HEADER: text, CHECKSUM: digest(version + text)}


def _version(header: Header) -> str:
    if any("keys.means" in layer.by_head for layer in header.layers):
        return CENTRED
    return CODED if header.codec else BIASED if has_bias(header) else VERSION


def has_bias(header: Header) -> bool:
    """True if entries of the file have an attention bias."""
    named = (name for layer in header.layers for name in layer.by_head)
    return any(name == "bias" or name.startswith("bias.") for name in named)


class ContextFile:
    """An open context file; each tensor is read and checked on its own.

    Raises ContextFileError for another format version and a damaged header.
    """

    def __init__(self, path: Path, place: Path, file: Any, size: int) -> None:
        self.path, self._place, self._file, self.size = path, place, file, size
        self.header = self._checked_header(file.metadata() or {})
        self._shapes = {name: file.get_slice(name).get_shape() for name in list(file.keys())}
        if self._shapes.keys() != self.header.checksums.keys():
            raise self.damaged("its tensors differ from those in its header")
        wrong = contradiction(self.header) or excess(self.header, self._shapes, size)
        if wrong is not None:
            raise self.damaged(wrong)

    @cached_property
    def held(self) -> HeldFile:
        """The file, open for as long as this is used: for entries that stay in it."""
        return HeldFile(self._place, self.path)

    def cold_bytes(self) -> int:
        """Bytes of the entries that stay in the file."""
        shapes = (shape for name, shape in self._shapes.items() if f"{COLD}." in name)
        return sum(map(math.prod, shapes)) * int(getattr(torch, self.header.dtype).itemsize)

    def length(self, name: str) -> int:
        """Entries of a tensor along its first axis, which is not read; 0 for one without axes."""
        name = self.header.same_as.get(name, name)
        if name not in self._shapes:
            raise self.damaged(f"the tensor {name} is missing")
        codec = self.header.codec
        stream = None if codec is None else codec.streams.get(name)
        return next(iter(self._shapes[name] if stream is None else stream.shape), 0)

    def tensor(self, name: str) -> Tensor:
        """A tensor on the CPU; raises ContextFileError if it is missing or its checksum differs."""
        name = self.header.same_as.get(name, name)
        if name not in self.header.checksums:
            raise self.damaged(f"the tensor {name} is missing")
        tensor: Tensor = self._file.get_tensor(name)
        if digest_of(tensor) != self.header.checksums[name]:
            raise self.damaged(f"{name} was altered")
        codec = self.header.codec
        if codec is None or name not in codec.streams:
            return tensor
        stream = codec.streams[name]
        return decompressed_tensor(tensor, stream.dtype, stream.shape, codec.compressor)

    def check_rope(self, rope: RopeHeader, frequencies: dict[str, Tensor]) -> None:
        """Raises ContextFileError, naming the differences to a model's RoPE."""
        names = [name for name in self.header.checksums if name.startswith("rope.")]
        theirs = {name.removeprefix("rope."): self.tensor(name) for name in names}
        if found := rope_differences(rope, self.header.rope, frequencies, theirs):
            raise ContextFileError(f"{self.path} was made with another RoPE: {'; '.join(found)}")

    def check(self) -> None:
        """Reads all tensors; raises ContextFileError if one is damaged."""
        for name in self.header.checksums:
            self.tensor(name)

    def damaged(self, how: str) -> ContextFileError:
        """The error for a damaged file; `how` says what was found."""
        return ContextFileError.damaged(self.path, how)

    def _checked_header(self, found: dict[str, str]) -> Header:
        if FORMAT not in found:
            raise ContextFileError(f"{self.path} is a safetensors file, but no context of kvfold")
        version = found[FORMAT]
        if version not in VERSIONS:
            raise ContextFileError(
                f"{self.path} has format version {version!r}, and this kvfold reads "
                f"{', '.join(VERSIONS)}: update kvfold, or compress the document again"
            )
        text = found.get(HEADER, "")
        if digest(version + text) != found.get(CHECKSUM):
            raise self.damaged("its header was altered")
        try:
            return Header.model_validate(json.loads(text))
        except (ValidationError, ValueError, RecursionError) as problem:
            raise self.damaged("its header does not have this version's fields") from problem


@contextmanager
def opened(path: str | Path) -> Iterator[ContextFile]:
    """The context file at `path`, open for the block.

    Raises ContextFileError if it is unreadable.
    """
    path = Path(path)
    try:
        with stable_path(path) as place, _of_tensors(place) as file:
            yield ContextFile(path, place, file, place.stat().st_size)
    except (OSError, SafetensorError) as problem:
        raise ContextFileError(
            f"cannot read {path}: {_reason_unreadable(path, problem)}"
        ) from problem


def _of_tensors(place: Path) -> Any:
    """The safetensors file at `place`; raises OSError, SafetensorError."""
    try:
        return safe_open(place, framework="pt")
    except FileNotFoundError:  # safetensors', whatever the reason is
        place.open("rb").close()
        raise
    except RuntimeError as problem:  # torch's, where it cannot open the file
        raise OSError(f"{problem}") from problem


def _reason_unreadable(path: Path, problem: Exception) -> str:
    """The reason a file cannot be opened, for the error message."""
    if not path.exists():
        return "there is no such file"
    if os.strerror(errno.EMFILE) in f"{problem}":
        return "too many files are open: let go of contexts, or raise the limit (ulimit -n)"
    if path.is_file() and not _begins_as_safetensors(path):
        return "it is no context file; make one with `kvfold compress`"
    return f"no whole context: {problem}"


def _begins_as_safetensors(path: Path) -> bool:
    """True if byte 8 opens a JSON object, as in safetensors; also if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(9)[8:] == b"{"
    except OSError:
        return True


def check_context_place(path: Path) -> None:
    """Raises KvfoldError if something other than a context file is at `path`, even a damaged one.

    A file without content is nothing.
    """
    check_kind(path, FORMAT, "context file")


def read_header(path: str | Path) -> Header:
    """The header of the context file at `path`; raises ContextFileError."""
    with opened(path) as file:
        return file.header


@contextmanager
def told_as_damage(file: ContextFile) -> Iterator[None]:
    """ContextFileError for what numbers raise that contradict each other, though checksums hold."""
    try:
        yield
    except (KvfoldError, torch.OutOfMemoryError):
        raise
    except UNFIT as bad:
        raise file.damaged(f"its layers do not fit its header ({bad})") from bad
